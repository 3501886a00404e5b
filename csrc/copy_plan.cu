// The whole plan in one launch: a block copies one tile of one rectangle, so every destination byte is written once and work is
// even whatever the sizes. Bound by memory: each byte is read once and written once.
//
// A tile is a run of groups. A group is the elements of a row that share 16 bytes of whichever side has the smaller elements, so
// rows that start anywhere are still stored in whole vectors, and loaded in vectors if the two sides are misaligned alike.
#include "copy_plan.h"

#include <cuda_runtime.h>

namespace megarl {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 2;  // loads that one thread has in flight

struct Same {
  template <typename T>
  __device__ T operator()(T bits) const { return bits; }
};
struct RoundToBfloat16 {
  __device__ uint16_t operator()(uint32_t bits) const { return to_bfloat16(bits); }
};
struct RoundToFloat16 {
  __device__ uint16_t operator()(uint32_t bits) const { return to_float16(bits); }
};
struct WidenBfloat16 {
  __device__ uint32_t operator()(uint16_t bits) const { return bfloat16_to_float32(bits); }
};
struct WidenFloat16 {
  __device__ uint32_t operator()(uint16_t bits) const { return float16_to_float32(bits); }
};
struct Bfloat16ToFloat16 {
  __device__ uint16_t operator()(uint16_t bits) const { return to_float16(bfloat16_to_float32(bits)); }
};
struct Float16ToBfloat16 {
  __device__ uint16_t operator()(uint16_t bits) const { return to_bfloat16(float16_to_float32(bits)); }
};

// W elements as 32-bit words; bytes in memory order.
template <typename T, int W>
struct Group {
  static constexpr int kWords = sizeof(T) * W / 4;
  uint32_t words[kWords];

  __device__ T get(int i) const {
    if constexpr (sizeof(T) == 8) return static_cast<T>(words[2 * i]) | static_cast<T>(words[2 * i + 1]) << 32;
    else return static_cast<T>(words[i * sizeof(T) / 4] >> (i * sizeof(T) % 4 * 8));
  }
  __device__ void add(int i, T bits) {  // into zeros
    static_assert(sizeof(T) < 8);
    words[i * sizeof(T) / 4] |= static_cast<uint32_t>(bits) << (i * sizeof(T) % 4 * 8);
  }
  __device__ void load(const T* from) {
    const auto address = reinterpret_cast<uintptr_t>(from);
    if (address % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const uint4 v = __ldcs(reinterpret_cast<const uint4*>(from) + i);
        words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
      }
    } else if (sizeof(T) >= 4 || address % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint32_t*>(from)[i];
    } else if constexpr (sizeof(T) < 4) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = 0;
#pragma unroll
      for (int i = 0; i < W; ++i) add(i, from[i]);
    }
  }
  __device__ void store(T* to) const {
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        reinterpret_cast<uint4*>(to)[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < W; ++i) to[i] = get(i);
    }
  }
};

template <typename S, typename D, int W, typename Convert>
__device__ Group<D, W> convert_group(const Group<S, W>& group, Convert convert) {
  if constexpr (sizeof(S) == sizeof(D) && sizeof(D) != 2) {
    return reinterpret_cast<const Group<D, W>&>(group);
  } else {
    Group<D, W> result{};
#pragma unroll
    for (int i = 0; i < W; ++i) result.add(i, convert(group.get(i)));
    return result;
  }
}

// Groups [first, first + count) of the rectangle.
template <typename S, typename D, typename Convert>
__device__ void copy_tile(const Rect& r, int64_t first, int count, Convert convert) {
  constexpr int W = 16 / (sizeof(S) < sizeof(D) ? sizeof(S) : sizeof(D));
  const int64_t per_row = groups_per_row(r), first_row = first / per_row, first_group = first % per_row;
  // Past the first row fewer than kTileGroups are left, so 32 bits divide exactly, and much faster than 64.
  const auto short_row = static_cast<uint32_t>(per_row < kTileGroups ? per_row : kTileGroups);
  for (int begin = threadIdx.x; begin < count; begin += kThreads * kUnroll) {
    const S* from[kUnroll];
    D* to[kUnroll];
    int64_t col[kUnroll];
    Group<S, W> groups[kUnroll];
    bool whole[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int index = begin + u * kThreads;
      int64_t row = first_row, group = first_group + index;
      if (group >= per_row) {
        const auto beyond = static_cast<uint32_t>(group - per_row);
        row += 1 + beyond / short_row;
        group = beyond % short_row;
      }
      auto src_row = reinterpret_cast<const S*>(r.src) + row * r.src_ld;
      auto dst_row = reinterpret_cast<D*>(r.dst) + row * r.dst_ld;
      const auto narrow = sizeof(S) < sizeof(D) ? reinterpret_cast<uintptr_t>(src_row) : reinterpret_cast<uintptr_t>(dst_row);
      col[u] = group * W - static_cast<int64_t>(narrow % 16 / (16 / W));
      from[u] = src_row + col[u];
      to[u] = dst_row + col[u];
      const bool inside = index < count;
      whole[u] = inside && col[u] >= 0 && col[u] + W <= r.cols;
      if (!inside) col[u] = r.cols;
      if (whole[u]) groups[u].load(from[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (whole[u]) {
        convert_group<S, D, W>(groups[u], convert).store(to[u]);
      } else {
#pragma unroll 1
        for (int i = 0; i < W; ++i) {
          if (col[u] + i >= 0 && col[u] + i < r.cols) to[u][i] = convert(from[u][i]);
        }
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const TiledRect* __restrict__ table, const int32_t* __restrict__ rect_of_tile) {
  const TiledRect entry = table[rect_of_tile[blockIdx.x]];
  const Rect& r = entry.rect;
  const int64_t first = (blockIdx.x - entry.first_tile) * kTileGroups, left = r.rows * groups_per_row(r) - first;
  const int count = static_cast<int>(left < kTileGroups ? left : kTileGroups);
  switch (r.mode) {
    case kCopy1: return copy_tile<uint8_t, uint8_t>(r, first, count, Same());
    case kCopy2: return copy_tile<uint16_t, uint16_t>(r, first, count, Same());
    case kCopy4: return copy_tile<uint32_t, uint32_t>(r, first, count, Same());
    case kCopy8: return copy_tile<uint64_t, uint64_t>(r, first, count, Same());
    case kFloat32ToBfloat16: return copy_tile<uint32_t, uint16_t>(r, first, count, RoundToBfloat16());
    case kFloat32ToFloat16: return copy_tile<uint32_t, uint16_t>(r, first, count, RoundToFloat16());
    case kBfloat16ToFloat32: return copy_tile<uint16_t, uint32_t>(r, first, count, WidenBfloat16());
    case kFloat16ToFloat32: return copy_tile<uint16_t, uint32_t>(r, first, count, WidenFloat16());
    case kBfloat16ToFloat16: return copy_tile<uint16_t, uint16_t>(r, first, count, Bfloat16ToFloat16());
    case kFloat16ToBfloat16: return copy_tile<uint16_t, uint16_t>(r, first, count, Float16ToBfloat16());
  }
}

}  // namespace

int CopyPlan::run_cuda(const TiledRect* table, const int32_t* rect_of_tile, void* stream) const {
  if (num_tiles_ == 0) return cudaSuccess;
  if (num_tiles_ > INT32_MAX) return cudaErrorInvalidConfiguration;  // the largest grid: 64 TB
  copy_kernel<<<static_cast<unsigned>(num_tiles_), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(table, rect_of_tile);
  return cudaGetLastError();
}

const char* cuda_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace megarl
