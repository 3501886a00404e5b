// Every operator on CUDA tensors: refused if its tensors are on different devices, else the CPU's kernel on
// the same memory. Copies, views and storages have kernels of their own.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include "device.h"

namespace hostcuda {
namespace {
using at::Tensor;
using Below = at::AutoDispatchBelowADInplaceOrView;

// One operator's arguments: on which device it runs, and what it reads and writes.
class Launch {
 public:
  explicit Launch(const c10::OperatorHandle& op)
      : name_(interned(op.operator_name().name + (op.operator_name().overload_name.empty()
                                                      ? ""
                                                      : "." + op.operator_name().overload_name))) {}

  // indices: tensors that may be on the CPU. listed: an element of a list, where no CPU scalar is allowed.
  void see(const Tensor& tensor, const std::string& argument, bool written, bool indices = false,
           bool listed = false) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) {
      const int device = tensor.device().index();
      if (device_ >= 0 && device != device_) other_device_ = device;
      if (device_ < 0) device_ = device;
      (written ? writes_ : reads_).push_back(block_of(tensor));
    } else if (tensor.device().is_cpu() && !indices && (tensor.dim() > 0 || written || listed)) {
      cpu_argument_ = &argument;
    }
  }

  void choose(int device) {
    if (device_ < 0) device_ = device;
  }

  int check() const {
    TORCH_CHECK(other_device_ < 0, "[hostcuda] Expected all tensors to be on the same device, but ", *name_,
                " found at least two devices, cuda:", device_, " and cuda:", other_device_, "!");
    TORCH_CHECK(device_ < 0 || !cpu_argument_,
                "[hostcuda] Expected all tensors to be on the same device, but ", *name_,
                " found at least two devices, cuda:", device_, " and cpu! (argument ",
                cpu_argument_ ? *cpu_argument_ : "", ")");
    return device_ < 0 ? current_device() : device_;
  }

  void start(int device) const {
    const int stream = current_stream(device);
    const uint64_t time = begin(stream);
    for (Block* block : reads_) access(block, false, stream, time, name_);
    for (Block* block : writes_) access(block, true, stream, time, name_);
  }

 private:
  const std::string* name_;
  int device_ = -1, other_device_ = -1;
  const std::string* cpu_argument_ = nullptr;
  std::vector<Block*> reads_, writes_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto& returns = op.schema().returns();
  const size_t count = arguments.size();
  const std::vector<c10::IValue> given(stack->end() - count, stack->end());
  stack->resize(stack->size() - count);

  Launch launch(op);
  int named_device = -1;
  for (size_t i = 0; i < count; ++i) {
    const auto& value = given[i];
    const auto& name = arguments[i].name();
    const bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    const bool indices = name == "indices";
    if (value.isTensor()) {
      launch.see(value.toTensor(), name, written);
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) launch.see(tensor, name, written, indices, true);
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector())
        if (tensor) launch.see(*tensor, name, written, indices, true);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      named_device = check_device(value.toDevice().index());
    }
  }
  launch.choose(named_device);
  const int device = launch.check();
  launch.start(device);

  struct Resized {
    Tensor out, result;
  };
  std::vector<Resized> resized;
  {
    DeviceScope scope(device);
    for (size_t i = 0; i < count; ++i) {
      const auto& value = given[i];
      if (value.isTensor()) {
        const Tensor& tensor = value.toTensor();
        if (tensor.defined() && tensor.is_cuda() && tensor.numel() == 0 && arguments[i].is_out()) {
          resized.push_back({tensor, at::empty({0}, tensor.options().device(at::kCPU))});
          stack->emplace_back(resized.back().result);
        } else {
          stack->emplace_back(as_cpu(tensor));
        }
      } else if (value.isTensorList()) {
        std::vector<Tensor> tensors;
        for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(as_cpu(tensor));
        stack->emplace_back(tensors);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> tensors;
        for (const auto& tensor : value.toOptionalTensorVector())
          tensors.push_back(tensor ? std::optional(as_cpu(*tensor)) : std::nullopt);
        stack->emplace_back(tensors);
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        stack->emplace_back(c10::Device(c10::kCPU));
      } else if (value.isGenerator()) {
        stack->emplace_back(cpu_generator(value.toGenerator(), device));
      } else if (value.isNone() && arguments[i].name() == "generator") {
        stack->emplace_back(cpu_generator(std::nullopt, device));
      } else {
        stack->emplace_back(value);
      }
    }
    Below below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (auto& [out, result] : resized)
      if (result.numel()) {
        at::native::resize_output(out, result.sizes());
        as_cpu(out).copy_(result);
      }
  }

  for (size_t r = 0; r < returns.size(); ++r) {
    auto& value = (*stack)[stack->size() - returns.size() + r];
    const auto* written = returns[r].alias_info();
    if (written && written->isWrite()) {  // an argument is returned
      for (size_t i = 0; i < count; ++i) {
        const auto* alias = arguments[i].alias_info();
        if (alias && alias->isWrite() && alias->beforeSets() == written->beforeSets()) value = given[i];
      }
    } else if (value.isTensor()) {
      value = as_cuda(value.toTensor(), device);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (Tensor& tensor : tensors) tensor = as_cuda(tensor, device);
      value = tensors;
    }
  }
}

// The contents of a copy's target are undefined until the copy is over.
void poison(const Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense() && tensor.numel())
    std::memset(tensor.mutable_data_ptr(), 0xff, tensor.numel() * tensor.element_size());
}

void copy_between_devices(const Tensor& to, const Tensor& from, const std::string* operation) {
  const int source = current_stream(from.device().index()), target = current_stream(to.device().index());
  block(source, *record(target));
  const uint64_t time = begin(source);
  access(block_of(from), false, source, time, operation);
  access(block_of(to), true, source, time, operation);
  as_cpu(to).copy_(as_cpu(from));
  block(target, *record(source));
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  static const std::string* operation = interned("aten::copy_");
  Below below;
  if (self.is_cuda() && src.is_cuda() && self.device() != src.device()) {
    copy_between_devices(self, src, operation);
    return self;
  }
  const Tensor& on_device = self.is_cuda() ? self : src;
  const bool within = self.is_cuda() && src.is_cuda(), to_host = !self.is_cuda();
  const int device = on_device.device().index();
  const int64_t id = current_stream_id(device);
  const int stream = stream_index(device, id);
  // From pageable memory the driver copies before it returns; into it nobody has promised that.
  const bool queued = within ? id != 0 : non_blocking && (to_host || is_pinned(src.storage().data()));
  if (!queued) drain(stream);
  const uint64_t time = launch(stream);
  access(block_of(src), false, stream, time, operation);
  access(block_of(self), true, stream, time, operation);
  if (queued) {
    // Device memory is not kept: it may belong to another tensor when the copy runs.
    auto to = self.is_cuda() ? raw_cpu(self) : self.detach(),
         from = src.is_cuda() ? raw_cpu(src) : src.detach();
    if (self.storage().data() != src.storage().data()) poison(to);
    enqueue(stream,
            [to, from] {
              Below below;
              at::NoGradGuard no_grad;
              to.copy_(from);
            },
            {block_of(self), block_of(src)});
  } else {
    as_cpu(self).copy_(as_cpu(src));
    if (!within && !non_blocking) synchronize_stream(stream);
  }
  return self;
}

at::Scalar item(const Tensor& tensor) {
  static const std::string* operation = interned("aten::item");
  Below below;
  const int stream = current_stream(tensor.device().index());
  access(block_of(tensor), false, stream, begin(stream), operation);
  synchronize_stream(stream);
  return at::_local_scalar_dense(as_cpu(tensor));
}

int device_for(std::optional<at::Device> device) { return check_device(device ? device->index() : -1); }

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pin,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_for(device))));
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_for(device))));
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const size_t needed = at::detail::computeStorageNbytes(size, c10::contiguous_strides(size),
                                                         self.element_size(), self.storage_offset());
  if (needed > self.storage().nbytes()) {
    const c10::DeviceGuard guard(self.device());
    resize_storage(self.storage(), needed);
  }
  return at::native::resize_(self, size, format);
}

Tensor& set_storage_(Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return self.set_(std::move(storage), 0, {count}, {});
}

Tensor& set_empty_(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0),
                       device_allocator(), true);
  return self.set_(std::move(storage), 0, {0}, {});
}

void record_tensor_on(Tensor& self, at::Stream stream) {
  if (Block* block = block_of(self)) record_stream(block, stream_index(stream.device_index(), stream.id()));
}

// There is no flash or memory-efficient attention here.
int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double,
                         bool, std::optional<double>, bool) {
  return 0;  // sdp::SDPBackend::math
}
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", item);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", [](const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  library.impl("unfold", at::native::unfold);
  library.impl("_reshape_alias", [](const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset",
               [](Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                  at::IntArrayRef stride) -> Tensor& {
                 return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
               });
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", set_storage_);
  library.impl("set_", set_empty_);
  library.impl("is_pinned", [](const Tensor&, std::optional<at::Device>) { return false; });
  library.impl("record_stream", record_tensor_on);
  library.impl("_fused_sdp_choice", choose_attention);
}
}  // namespace hostcuda
