// Digests of device memory: the sums over words of csrc/digest.h, one launch for all views.
#include "digest.h"

#include <cuda_runtime.h>

namespace megarl {
namespace {

constexpr int kWarp = 32;
static_assert(kSamples <= kWarp);
constexpr int kThreads = 256;

// The element as it is at its destination.
template <typename T>
__device__ uint64_t value_at(int64_t mode, const T* at) {
  switch (mode) {
    case kFloat32ToBfloat16: return to_bfloat16(static_cast<uint32_t>(*at));
    case kFloat32ToFloat16: return to_float16(static_cast<uint32_t>(*at));
    case kBfloat16ToFloat32: return bfloat16_to_float32(static_cast<uint16_t>(*at));
    case kFloat16ToFloat32: return float16_to_float32(static_cast<uint16_t>(*at));
    case kBfloat16ToFloat16: return to_float16(bfloat16_to_float32(static_cast<uint16_t>(*at)));
    case kFloat16ToBfloat16: return to_bfloat16(float16_to_float32(static_cast<uint16_t>(*at)));
    default: return *at;
  }
}

__device__ uint64_t element(int64_t mode, int64_t address) {
  switch (src_size(mode)) {
    case 1: return value_at(mode, reinterpret_cast<const uint8_t*>(address));
    case 2: return value_at(mode, reinterpret_cast<const uint16_t*>(address));
    case 4: return value_at(mode, reinterpret_cast<const uint32_t*>(address));
    default: return *reinterpret_cast<const uint64_t*>(address);
  }
}

__device__ uint64_t read_word(const View& view, int64_t row, int64_t word) {
  const int64_t from = src_size(view.mode), to = dst_size(view.mode), per_word = 8 / to, col = word * per_word;
  const int64_t address = view.address + (row * view.ld + col) * from;
  const int64_t left = view.cols - col, elements = left < per_word ? left : per_word;
  if (is_copy(view.mode) && address % 8 == 0 && elements == per_word) return __ldcs(reinterpret_cast<const unsigned long long*>(address));
  uint64_t bits = 0;
#pragma unroll 1
  for (int64_t i = 0; i < elements; ++i) bits |= element(view.mode, address + i * from) << (8 * to * i);
  return bits;
}

// Adds every thread's part to *sum.
__device__ void add_to(unsigned long long* sum, unsigned long long part) {
  for (int offset = warpSize / 2; offset > 0; offset /= 2) part += __shfl_down_sync(~0u, part, offset);
  if (threadIdx.x % warpSize == 0) atomicAdd(sum, part);
}

__global__ void __launch_bounds__(kThreads) full_kernel(const TiledView* __restrict__ table, const int32_t* __restrict__ view_of_tile,
                                                        uint64_t seed, unsigned long long* sums) {
  const int32_t index = view_of_tile[blockIdx.x];
  const TiledView entry = table[index];
  const View& view = entry.view;
  const int64_t first = (blockIdx.x - entry.first_tile) * kTileWords, left = num_words(view) - first;
  const int64_t count = left < kTileWords ? left : kTileWords, per_row = words_per_row(view);
  const int64_t first_row = first / per_row, first_word = first % per_row;
  const auto short_row = static_cast<uint32_t>(per_row < kTileWords ? per_row : kTileWords);
  uint64_t sum = 0;
#pragma unroll 1  // unrolled it spills, and there are threads enough to keep the memory busy
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    int64_t row = first_row, word = first_word + i;
    if (word >= per_row) {
      const auto beyond = static_cast<uint32_t>(word - per_row);
      row += 1 + beyond / short_row;
      word = beyond % short_row;
    }
    sum += term(read_word(view, row, word), static_cast<uint64_t>(first + i), seed);
  }
  add_to(sums + index, sum);
}

// One block per view, one thread per sample.
__global__ void __launch_bounds__(kWarp) sampled_kernel(const TiledView* __restrict__ table, uint64_t seed, unsigned long long* sums) {
  const View view = table[blockIdx.x].view;
  uint64_t sum = 0;
  const int64_t words = num_words(view);
  if (threadIdx.x < (words < kSamples ? words : kSamples)) {
    const int64_t word = sampled_word(words, threadIdx.x, seed), per_row = words_per_row(view);
    sum = term(read_word(view, word / per_row, word % per_row), static_cast<uint64_t>(word), seed);
  }
  add_to(sums + blockIdx.x, sum);
}

}  // namespace

int sum_cuda(const TiledView* table, const int32_t* view_of_tile, int64_t num_views, int64_t num_tiles, uint64_t seed, bool sampled,
             uint64_t* sums, void* stream) {
  const int64_t blocks = sampled ? num_views : num_tiles;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  auto out = reinterpret_cast<unsigned long long*>(sums);
  const auto grid = static_cast<unsigned>(blocks);
  const auto on = static_cast<cudaStream_t>(stream);
  if (sampled) sampled_kernel<<<grid, kWarp, 0, on>>>(table, seed, out);
  else full_kernel<<<grid, kThreads, 0, on>>>(table, view_of_tile, seed, out);
  return cudaGetLastError();
}

}  // namespace megarl
