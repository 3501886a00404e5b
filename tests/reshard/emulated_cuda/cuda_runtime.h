// What csrc/*.cu needs of CUDA, on a CPU: the threads of a launch run one after the other, each a warp of its own.
#pragma once
#include <cstdint>

#define __global__
#define __device__
#define __launch_bounds__(threads)

struct Index {
  unsigned x;
};
inline thread_local Index blockIdx, threadIdx;
constexpr int warpSize = 1;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

template <typename T>
T __ldcs(const T* from) {
  // A GPU stops at a misaligned vector, a CPU would not.
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) __builtin_trap();
  return *from;
}
inline unsigned long long __shfl_down_sync(unsigned, unsigned long long value, int) { return value; }
inline void atomicAdd(unsigned long long* sum, unsigned long long part) { *sum += part; }

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidConfiguration = 9;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

// Stands for kernel<<<blocks, threads, shared, stream>>>(...).
template <typename Kernel>
void launch(int64_t blocks, int64_t threads, int, cudaStream_t, const Kernel& kernel) {
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel();
  }
}
