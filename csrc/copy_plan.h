// Batched strided 2-D copies: what moving weights from one layout to another comes down to.
// Addresses and an opaque stream, no libtorch: one build serves every PyTorch, with or without CUDA.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __CUDACC__
#define MEGARL_HOST_DEVICE __host__ __device__
#else
#define MEGARL_HOST_DEVICE
#endif

namespace megarl {

// What happens to an element. Same-size copies are named by their size in bytes, conversions by source and destination size.
enum Mode : int64_t { kCopy1 = 1, kCopy2 = 2, kCopy4 = 4, kCopy8 = 8, kBfloat16ToFloat32 = 24, kFloat32ToBfloat16 = 42 };

MEGARL_HOST_DEVICE inline int64_t src_size(int64_t mode) { return mode < 10 ? mode : mode / 10; }
MEGARL_HOST_DEVICE inline int64_t dst_size(int64_t mode) { return mode < 10 ? mode : mode % 10; }

// One row of the int64 [N, 7] array that Python hands over. src, dst: addresses in bytes; the rest counts elements.
struct Rect {
  int64_t src, dst, rows, cols, src_ld, dst_ld, mode;
};

// A Rect and the number of tiles before it: what the CUDA kernel reads, int64 [N, 8].
struct TiledRect {
  Rect rect;
  int64_t first_tile;
};
static_assert(sizeof(Rect) == 7 * sizeof(int64_t) && sizeof(TiledRect) == 8 * sizeof(int64_t));

constexpr int64_t kTileElements = 1 << 14;

// Rounds to nearest, ties to even. A NaN keeps its sign and becomes quiet: rounding its bits could carry it into infinity.
MEGARL_HOST_DEVICE inline uint16_t to_bfloat16(uint32_t bits) {
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(((bits & 0x7fffffffu) > 0x7f800000u ? (bits | 0x400000u) : rounded) >> 16);
}
MEGARL_HOST_DEVICE inline uint32_t to_float32(uint16_t bits) { return static_cast<uint32_t>(bits) << 16; }

// Rectangles that were checked once and are copied many times. It owns no tensor: the caller keeps the memory alive.
class CopyPlan {
 public:
  // Throws std::invalid_argument naming the index of the first bad rectangle.
  CopyPlan(const Rect* rects, int64_t count);

  int64_t num_rects() const { return static_cast<int64_t>(rects_.size()); }
  int64_t num_tiles() const { return num_tiles_; }
  int64_t bytes() const { return bytes_; }  // written by one run

  void run(int num_threads) const;

  // `table` has num_rects() entries of host memory. The caller copies it to the device that runs it.
  void fill_table(TiledRect* table) const;
  // One launch; returns a cudaError_t. `table` is on the current device, `stream` is a cudaStream_t.
  int run_cuda(const TiledRect* table, void* stream) const;

 private:
  std::vector<Rect> rects_;  // non-empty; contiguous ones are a single row
  int64_t bytes_ = 0;
  int64_t num_tiles_ = 0;
};

const char* cuda_error_string(int error);

}  // namespace megarl
