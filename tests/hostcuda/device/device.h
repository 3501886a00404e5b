// The emulated devices as PyTorch sees them.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>

#include "streams.h"

namespace hostcuda {
c10::Allocator* device_allocator();

// Inside, what the CPU's kernels allocate is memory of `device`, and that device is the current one.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();

 private:
  int device_before_, allocating_before_;
};

Block* block_of(const c10::Storage& storage);
Block* block_of(const at::Tensor& tensor);    // null for a tensor without device memory
at::Tensor as_cpu(const at::Tensor& tensor);  // shares and keeps the memory; other tensors as they are
at::Tensor raw_cpu(
    const at::Tensor& tensor);  // shares the memory without keeping it, as a queued kernel does
at::Tensor as_cuda(const at::Tensor& result, int device);  // of a CPU kernel inside a DeviceScope
bool is_pinned(const void* pointer);
at::Generator cpu_generator(const std::optional<at::Generator>& of, int device);
const at::Generator& default_generator(int device);
void resize_storage(const c10::Storage& storage, size_t bytes);

// Take part in a stream's work: run what is queued before, and check for races.
uint64_t begin(int stream);
}  // namespace hostcuda
