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

// A group is W elements, 16 bytes of the side with the smaller elements. A row needs one more than its size if it starts within one.
MEGARL_HOST_DEVICE inline int64_t groups_per_row(const Rect& r) {
  const int64_t from = src_size(r.mode), to = dst_size(r.mode), W = 16 / (from < to ? from : to);
  return (r.cols + 2 * W - 2) / W;
}
constexpr int64_t kTileGroups = 2048;  // 32 KB

// Rectangles that were checked once and are copied many times. It owns no tensor: the caller keeps the memory alive.
class CopyPlan {
 public:
  // Throws std::invalid_argument naming the index of the first bad rectangle.
  CopyPlan(const Rect* rects, int64_t count);

  int64_t num_rects() const { return static_cast<int64_t>(rects_.size()); }
  int64_t num_tiles() const { return num_tiles_; }
  int64_t bytes() const { return bytes_; }  // written by one run

  void run(int num_threads) const;

  // num_rects() and num_tiles() entries of host memory. The caller copies both to the device that runs the plan.
  void fill_tables(TiledRect* table, int32_t* rect_of_tile) const;
  // One launch; returns a cudaError_t. Both tables are on the current device, `stream` is a cudaStream_t.
  int run_cuda(const TiledRect* table, const int32_t* rect_of_tile, void* stream) const;

 private:
  std::vector<Rect> rects_;  // non-empty; contiguous ones are a single row
  int64_t bytes_ = 0;
  int64_t num_tiles_ = 0;
};

const char* cuda_error_string(int error);

}  // namespace megarl
