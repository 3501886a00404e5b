// Batched strided 2-D copies: what moving weights from one layout to another comes down to.
#pragma once
#include <cstdint>
#include <vector>

#include "rect.h"

namespace megarl {

// A Rect and the number of tiles before it: what the CUDA kernel reads, int64 [N, 8].
struct TiledRect {
  Rect rect;
  int64_t first_tile;
};
static_assert(sizeof(TiledRect) == 8 * sizeof(int64_t));

constexpr int64_t kTileElements = 1 << 14;

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
