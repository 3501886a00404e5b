// Allocators, generators, guard and hooks: what PyTorch asks of an accelerator besides kernels.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace hostcuda {
namespace {
thread_local int allocating_on = -1;  // in a DeviceScope: its device

// The context of a pointer is the pointer, as Allocator::raw_allocate demands.
void free_block(void* context) {
  if (Block* block = block_at(context)) release(block);
}

c10::DataPtr allocate_on(int device, size_t bytes, c10::Device says) {
  if (!bytes) return {nullptr, nullptr, &free_block, says};
  Block* block = allocate(device, bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, block, "CUDA out of memory. Tried to allocate ", bytes >> 10,
                   " KiB. GPU ", device, " has a total capacity of ", stats(device).total >> 20,
                   " MiB, of which ", stats(device).allocated >> 20, " MiB are allocated by PyTorch.");
  return {block->memory, block->memory, &free_block, says};
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    return allocate_on(device, bytes, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (Block* block = block_at(pointer.get_context()))
      record_stream(block, stream_index(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
} device_memory;

// Replaces the CPU's allocator, so that the results of CPU kernels that stand in for CUDA kernels are device
// memory.
struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (allocating_on < 0) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    return allocate_on(allocating_on, bytes, c10::Device(c10::kCPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_raw; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  static void free_raw(void* pointer) {
    if (Block* block = block_at(pointer))
      release(block);
    else
      c10::GetDefaultCPUAllocator()->raw_deallocate(pointer);
  }
} host_memory;

struct PinnedMemory final : at::HostAllocator {
  std::mutex lock;
  std::map<const char*, size_t> live;
  static PinnedMemory& only() {
    static auto* memory = new PinnedMemory;
    return *memory;
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto pointer = c10::GetDefaultCPUAllocator()->allocate(bytes ? bytes : 1);
    auto* kept = new c10::DataPtr(std::move(pointer));
    std::lock_guard guard(lock);
    live[static_cast<const char*>(kept->get())] = bytes ? bytes : 1;
    return {kept->get(), kept, &free_pinned, c10::Device(c10::kCPU)};
  }
  static void free_pinned(void* context) {
    auto* kept = static_cast<c10::DataPtr*>(context);
    {
      std::lock_guard guard(only().lock);
      only().live.erase(static_cast<const char*>(kept->get()));
    }
    delete kept;
  }
  bool has(const void* pointer) {
    std::lock_guard guard(lock);
    auto after = live.upper_bound(static_cast<const char*>(pointer));
    return after != live.begin() && (--after, pointer < after->first + after->second);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }  // queued copies keep host memory themselves
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

// Its numbers are the CPU's for the same seed.
struct Generator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit Generator(int device, at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)),
                      c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        inner(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "hostcuda: generators have no offset"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device_.index(), inner.clone()); }
};

const std::vector<at::Generator>& generators() {
  static const auto all = [] {
    std::vector<at::Generator> all;
    for (int device = 0; device < device_count(); ++device)
      all.push_back(at::make_generator<Generator>(device));
    return all;
  }();
  return all;
}

c10::Device cuda(int device) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(device)}; }
c10::Stream stream_of(int device, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, cuda(device), id); }
int index_of(const c10::Stream& stream) { return stream_index(stream.device_index(), stream.id()); }
using Recorded = std::shared_ptr<Event>;
const Event& event_of(void* event) { return **static_cast<Recorded*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return cuda(set_current_device(device.index()));
  }
  c10::Device getDevice() const override { return cuda(current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  c10::Stream getStream(c10::Device device) const override {
    const int index = check_device(device.index());
    return stream_of(index, current_stream_id(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(check_device(device.index()), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int index = check_device(device.index());
    return stream_of(index, new_stream(index));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(stream.device_index(), set_current_stream(stream.device_index(), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    drain(index_of(stream));  // what is launched on the handle follows what is queued
    return reinterpret_cast<void*>(stream.id());
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Recorded;
    *static_cast<Recorded*>(*event) = hostcuda::record(index_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) hostcuda::block(index_of(stream), event_of(event));
  }
  bool queryEvent(void* event) const override { return !event || query_event(event_of(event)); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override { return query_stream(index_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(index_of(stream)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize_event(event_of(event));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(check_device(device)); }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(start && end && is_over(event_of(start)) && is_over(event_of(end)),
                "CUDA error: device not ready");
    return (event_of(end).seconds - event_of(start).seconds) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_memory.recordStream(pointer, stream);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(hostcuda::current_device());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(set_current_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::only(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize_device(device); }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    for (int device = 0; device < device_count(); ++device)
      if (owns(device, pointer)) return cuda(device);
    TORCH_CHECK(false,
                "The specified pointer resides on host memory and is not registered with any CUDA device.");
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(check_device(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(check_device(device));
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);  // the name that PyTorch looks for

void free_alias(void* context) { delete static_cast<c10::Storage*>(context); }
void keep_nothing(void*) {}

at::Tensor alias(const at::Tensor& tensor, void* context, c10::DeleterFnPtr deleter) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
      c10::DataPtr(tensor.storage().mutable_data(), context, deleter, c10::Device(c10::kCPU)), nullptr,
      false);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                      tensor.storage_offset());
  return result;
}

struct Registered {
  Registered() {
    c10::SetAllocator(c10::kCUDA, &device_memory, 255);
    c10::SetAllocator(c10::kCPU, &host_memory, 255);
    at::setHostAllocator(c10::kCUDA, &PinnedMemory::only(), 255);
  }
} registered;
}  // namespace

c10::Allocator* device_allocator() { return &device_memory; }

DeviceScope::DeviceScope(int device)
    : device_before_(set_current_device(device)), allocating_before_(std::exchange(allocating_on, device)) {}
DeviceScope::~DeviceScope() {
  allocating_on = allocating_before_;
  set_current_device(device_before_);
}

Block* block_of(const c10::Storage& storage) {
  const auto& pointer = storage.data_ptr();
  return pointer.get_deleter() == &free_block ? block_at(pointer.get_context()) : nullptr;
}
Block* block_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? block_of(tensor.storage()) : nullptr;
}

at::Tensor as_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return alias(tensor, new c10::Storage(tensor.storage()), &free_alias);
}
at::Tensor raw_cpu(const at::Tensor& tensor) { return alias(tensor, nullptr, &keep_nothing); }

at::Tensor as_cuda(const at::Tensor& result, int device) {
  if (!result.defined() || !result.device().is_cpu()) return result;
  c10::Storage storage = result.storage();
  auto* implementation = storage.unsafeGetStorageImpl();
  auto& pointer = implementation->_mutable_data_ptr_no_checks();
  if (pointer.get_deleter() == &free_alias) {  // a view of an argument
    storage = *static_cast<c10::Storage*>(pointer.get_context());
  } else if (pointer.get_deleter() == &free_block) {
    pointer.unsafe_set_device(cuda(device));
    implementation->set_allocator(&device_memory);
  } else {
    auto copy = allocate_on(device, storage.nbytes(), cuda(device));
    std::memcpy(copy.get(), storage.data(), storage.nbytes());
    storage = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(copy), &device_memory,
                           true);
  }
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), result.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(),
                                                      result.storage_offset());
  return tensor;
}

bool is_pinned(const void* pointer) { return PinnedMemory::only().has(pointer); }
const at::Generator& default_generator(int device) { return generators().at(device); }

at::Generator cpu_generator(const std::optional<at::Generator>& of, int device) {
  if (!of || !of->defined()) return default_generator(device).get<Generator>()->inner;
  TORCH_CHECK(of->device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              of->device().type(), "'");
  return of->get<Generator>()->inner;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const int device = storage.device().index();
  const int stream = current_stream(device);
  static const std::string* operation = interned("the resizing of a storage");
  auto fresh = allocate_on(device, bytes, cuda(device));
  if (const size_t kept = std::min(bytes, storage.nbytes())) {
    const uint64_t time = begin(stream);
    access(block_of(storage), false, stream, time, operation);
    access(block_at(fresh.get()), true, stream, time, operation);
    std::memcpy(fresh.get(), storage.data(), kept);
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

uint64_t begin(int stream) {
  drain(stream);
  return launch(stream);
}
}  // namespace hostcuda
