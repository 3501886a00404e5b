// The whole plan in one launch: a block copies one tile of one rectangle, so every destination byte is written once and work
// is even whatever the sizes. Bound by memory: 2 bytes of traffic per byte copied.
#include "copy_plan.h"

#include <cuda_runtime.h>

namespace megarl {
namespace {

constexpr int kThreads = 256;

// The last rectangle that starts at or before `tile`.
__device__ const TiledRect& find_rect(const TiledRect* table, int64_t count, int64_t tile) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (table[middle].first_tile <= tile) low = middle;
    else high = middle;
  }
  return table[low];
}

// Calls body(src offset, dst offset), in elements, for each W elements of [first, last). A group of W never leaves its row.
template <int W, typename Body>
__device__ void for_each_group(const Rect& r, int64_t first, int64_t last, Body body) {
  const int64_t first_row = first / r.cols, first_col = first % r.cols;
  // Past the first row only kTileElements elements are left, so 32 bits divide exactly, and much faster than 64.
  const uint32_t cols = static_cast<uint32_t>(r.cols <= kTileElements ? r.cols : kTileElements + 1);
  const uint32_t count = static_cast<uint32_t>(last - first);
  for (uint32_t i = threadIdx.x * W; i < count; i += kThreads * W) {
    int64_t row = first_row, col = first_col + i;
    if (col >= r.cols) {
      const uint32_t beyond = static_cast<uint32_t>(col - r.cols);
      row += 1 + beyond / cols;
      col = beyond % cols;
    }
    body(row * r.src_ld + col, row * r.dst_ld + col);
  }
}

// Whether every group of W elements starts on a 16-byte boundary on both sides.
__device__ bool aligned(const Rect& r, int W) {
  return ((r.src | r.dst | r.src_ld * src_size(r.mode) | r.dst_ld * dst_size(r.mode)) & 15) == 0 && r.cols % W == 0;
}

template <typename T>
__device__ void copy_tile(const Rect& r, int64_t first, int64_t last) {
  constexpr int W = sizeof(uint4) / sizeof(T);
  auto src = reinterpret_cast<const T*>(r.src);
  auto dst = reinterpret_cast<T*>(r.dst);
  if (aligned(r, W)) {
    for_each_group<W>(r, first, last, [=](int64_t s, int64_t d) {
      *reinterpret_cast<uint4*>(dst + d) = __ldcs(reinterpret_cast<const uint4*>(src + s));
    });
  } else {
    for_each_group<1>(r, first, last, [=](int64_t s, int64_t d) { dst[d] = src[s]; });
  }
}

__device__ uint32_t two_bfloat16(uint32_t low, uint32_t high) { return to_bfloat16(low) | static_cast<uint32_t>(to_bfloat16(high)) << 16; }

__device__ void float32_to_bfloat16_tile(const Rect& r, int64_t first, int64_t last) {
  auto src = reinterpret_cast<const uint32_t*>(r.src);
  auto dst = reinterpret_cast<uint16_t*>(r.dst);
  if (aligned(r, 8)) {
    for_each_group<8>(r, first, last, [=](int64_t s, int64_t d) {
      const uint4 a = __ldcs(reinterpret_cast<const uint4*>(src + s)), b = __ldcs(reinterpret_cast<const uint4*>(src + s) + 1);
      *reinterpret_cast<uint4*>(dst + d) =
          make_uint4(two_bfloat16(a.x, a.y), two_bfloat16(a.z, a.w), two_bfloat16(b.x, b.y), two_bfloat16(b.z, b.w));
    });
  } else {
    for_each_group<1>(r, first, last, [=](int64_t s, int64_t d) { dst[d] = to_bfloat16(src[s]); });
  }
}

__device__ void bfloat16_to_float32_tile(const Rect& r, int64_t first, int64_t last) {
  auto src = reinterpret_cast<const uint16_t*>(r.src);
  auto dst = reinterpret_cast<uint32_t*>(r.dst);
  if (aligned(r, 8)) {
    for_each_group<8>(r, first, last, [=](int64_t s, int64_t d) {
      const uint4 v = __ldcs(reinterpret_cast<const uint4*>(src + s));
      auto to = reinterpret_cast<uint4*>(dst + d);
      to[0] = make_uint4(v.x << 16, v.x & 0xffff0000u, v.y << 16, v.y & 0xffff0000u);
      to[1] = make_uint4(v.z << 16, v.z & 0xffff0000u, v.w << 16, v.w & 0xffff0000u);
    });
  } else {
    for_each_group<1>(r, first, last, [=](int64_t s, int64_t d) { dst[d] = bfloat16_to_float32(src[s]); });
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const TiledRect* __restrict__ table, int64_t count) {
  const TiledRect entry = find_rect(table, count, blockIdx.x);
  const Rect& r = entry.rect;
  const int64_t first = (blockIdx.x - entry.first_tile) * kTileElements, elements = r.rows * r.cols;
  const int64_t last = elements < first + kTileElements ? elements : first + kTileElements;
  switch (r.mode) {
    case kCopy1: return copy_tile<uint8_t>(r, first, last);
    case kCopy2: return copy_tile<uint16_t>(r, first, last);
    case kCopy4: return copy_tile<uint32_t>(r, first, last);
    case kCopy8: return copy_tile<uint64_t>(r, first, last);
    case kFloat32ToBfloat16: return float32_to_bfloat16_tile(r, first, last);
    case kBfloat16ToFloat32: return bfloat16_to_float32_tile(r, first, last);
  }
}

}  // namespace

int CopyPlan::run_cuda(const TiledRect* table, void* stream) const {
  if (num_tiles_ == 0) return cudaSuccess;
  if (num_tiles_ > INT32_MAX) return cudaErrorInvalidConfiguration;  // the largest grid; 35 T elements
  copy_kernel<<<static_cast<unsigned>(num_tiles_), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(table, num_rects());
  return cudaGetLastError();
}

const char* cuda_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace megarl
