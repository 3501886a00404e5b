// The Python module _hostcuda: what install.py needs to answer for torch._C.
#include <pybind11/functional.h>
#include <torch/csrc/Event.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device.h"
#include "nccl.h"

namespace py = pybind11;
using namespace hostcuda;

namespace {
py::dict memory_stats(int device) {
  const auto& numbers = stats(device);
  auto stat = [](int64_t current, int64_t peak) {
    py::dict all, one;
    one["current"] = current;
    one["peak"] = peak;
    all["all"] = one;
    return all;
  };
  py::dict answer;
  answer["allocated_bytes"] = stat(numbers.allocated, numbers.allocated_peak);
  answer["requested_bytes"] = stat(numbers.requested, numbers.requested_peak);
  answer["reserved_bytes"] = stat(numbers.allocated + numbers.cached, numbers.reserved_peak);
  answer["active_bytes"] = stat(numbers.allocated, numbers.allocated_peak);
  answer["allocation"] = stat(numbers.allocations - numbers.frees, numbers.allocations);
  answer["num_alloc_retries"] = int64_t{0};
  answer["num_ooms"] = int64_t{0};
  return answer;
}

void reset_peaks(int device) {
  auto& numbers = stats(device);
  numbers.allocated_peak = numbers.allocated;
  numbers.requested_peak = numbers.requested;
  numbers.reserved_peak = numbers.allocated + numbers.cached;
}

// (file descriptor, offset, size) of a storage's memory.
std::tuple<int, size_t, size_t> exported(const at::Tensor& tensor) {
  const Block* block = block_of(tensor);
  TORCH_CHECK(block && !block->imported,
              "CUDA error: invalid argument (memory of another process is not re-exported)");
  auto [file, offset] = locate(block);
  return {file, offset, tensor.storage().nbytes()};
}

at::Tensor imported(int device, const std::string& path, size_t offset, size_t bytes) {
  Block* block = import_block(device, path, offset, bytes);
  char* data = block->memory + block->skipped;
  c10::DataPtr pointer(data, data, device_allocator()->allocate(0).get_deleter(),
                       c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer), device_allocator(), false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), caffe2::TypeMeta::Make<uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(bytes)});
  return tensor;
}
}  // namespace

PYBIND11_MODULE(_hostcuda, module) {
  module.def("device_count", device_count);
  module.def("current_device", current_device);
  module.def("set_device", [](int device) { return device < 0 ? -1 : set_current_device(device); });
  module.def("current_stream", [](int device) { return current_stream_id(check_device(device)); });
  module.def("set_stream", [](int device, int64_t id) { set_current_stream(device, id); });
  module.def("raw_stream", [](int device, int64_t id) {
    drain(stream_index(device, id));  // what is launched on the handle follows what is queued
    return id;
  });
  module.def("sleep",
             [] { enqueue(current_stream(current_device()), [] {}); });  // a kernel that takes its time
  module.def("synchronize", [](int device) { synchronize_device(check_device(device)); });
  module.def("elapsed_ms", [](const py::handle& start, const py::handle& end) {
    auto event = [](const py::handle& of) -> const c10::Event& {
      return reinterpret_cast<THPEvent*>(of.ptr())->event;
    };
    return event(start).elapsedTime(event(end));
  });
  module.def("require_initialization", [] { torch::utils::set_requires_device_init(at::kCUDA, true); });
  module.def("memory_stats", memory_stats);
  module.def("reset_peaks", reset_peaks);
  module.def("total_memory", [](int device) { return stats(device).total; });
  module.def("empty_cache", empty_cache);
  module.def("find_races", find_races);
  module.def("default_generator", default_generator);
  module.def("resize_storage",
             [](const at::Tensor& tensor, size_t bytes) { resize_storage(tensor.storage(), bytes); });
  module.def("export_memory", exported);
  module.def("import_memory", imported);
  module.def("make_nccl", [](int rank, int size, const py::function& connect) {
    auto kept = std::shared_ptr<py::function>(new py::function(connect), [](py::function* function) {
      const py::gil_scoped_acquire gil;
      delete function;
    });
    auto backend = make_nccl(rank, size, [kept](int device, int peer) {
      const py::gil_scoped_acquire gil;
      return (*kept)(device, peer).cast<c10::intrusive_ptr<c10d::Backend>>();
    });
    return py::cast(
        backend);  // now, because PyTorch tells Python of the class when it imports torch.distributed
  });
}
