#include "copy_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "convert.h"
#include "threads.h"

namespace megarl {
namespace {

constexpr int64_t kMaxBytes = std::numeric_limits<int64_t>::max() / 16;
constexpr int64_t kMinBytesPerThread = 1 << 18;  // below this, starting a thread costs more than the copy
constexpr int64_t kStreamedBytes = 1 << 24;      // from here on the caches would not hold what is written until it is read
constexpr int64_t kStreamedRun = 256;            // shorter rows write too few whole cache lines

void require(bool ok, int64_t index, const std::string& message) {
  if (!ok) throw std::invalid_argument("rect " + std::to_string(index) + ": " + message);
}

void check(const Rect& r, int64_t index) {
  const auto str = [](int64_t value) { return " (" + std::to_string(value) + ")"; };
  require(is_known(r.mode), index, "mode" + str(r.mode) + " must be " + known_modes());
  require(r.rows >= 0, index, "rows" + str(r.rows) + " must be >= 0");
  require(r.cols >= 0, index, "cols" + str(r.cols) + " must be >= 0");
  require(r.src_ld >= r.cols, index, "src_ld" + str(r.src_ld) + " must be >= cols" + str(r.cols));
  require(r.dst_ld >= r.cols, index, "dst_ld" + str(r.dst_ld) + " must be >= cols" + str(r.cols));
  if (r.rows == 0 || r.cols == 0) return;
  require(std::max(r.src_ld, r.dst_ld) <= kMaxBytes / r.rows, index, "rows" + str(r.rows) + " x leading dimension must fit in 63 bits of bytes");
  require(r.src > 0 && r.src % src_size(r.mode) == 0, index, "src" + str(r.src) + " must be an address aligned to its elements");
  require(r.dst > 0 && r.dst % dst_size(r.mode) == 0, index, "dst" + str(r.dst) + " must be an address aligned to its elements");
}

// Elements [first, last) of the rectangle, counted row by row.
void copy_range(const Rect& r, bool stream, int64_t first, int64_t last) {
  auto src = reinterpret_cast<const char*>(r.src);
  auto dst = reinterpret_cast<char*>(r.dst);
  const auto run = stream && r.cols * dst_size(r.mode) >= kStreamedRun ? stream_run : convert_run;
  int64_t row = first / r.cols, col = first % r.cols;
  while (first < last) {
    const int64_t count = std::min(r.cols - col, last - first);
    run(r.mode, src + (row * r.src_ld + col) * src_size(r.mode), dst + (row * r.dst_ld + col) * dst_size(r.mode), count);
    first += count;
    ++row;
    col = 0;
  }
}

// Bytes [first, last) of everything the plan writes, so that threads share evenly whatever the sizes of the rectangles.
void copy_bytes(const std::vector<Rect>& rects, bool stream, int64_t first, int64_t last) {
  int64_t before = 0;
  for (const Rect& r : rects) {
    const int64_t size = dst_size(r.mode), elements = r.rows * r.cols;
    const auto element = [&](int64_t byte) { return std::clamp<int64_t>((byte - before + size - 1) / size, 0, elements); };
    const int64_t from = element(first), to = element(last);
    if (from < to) copy_range(r, stream, from, to);
    before += elements * size;
    if (before >= last) break;
  }
  if (stream) stream_fence();
}

int64_t tiles(const Rect& r) { return (r.rows * groups_per_row(r) + kTileGroups - 1) / kTileGroups; }

}  // namespace

CopyPlan::CopyPlan(const Rect* rects, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    Rect r = rects[i];
    check(r, i);
    if (r.rows == 0 || r.cols == 0) continue;
    const bool one_row = r.rows == 1 || (r.src_ld == r.cols && r.dst_ld == r.cols);
    if (one_row) r = {r.src, r.dst, 1, r.rows * r.cols, r.rows * r.cols, r.rows * r.cols, r.mode};
    rects_.push_back(r);
    require(r.rows * r.cols <= (kMaxBytes - bytes_) / dst_size(r.mode), i, "the plan must write less than 63 bits of bytes");
    bytes_ += r.rows * r.cols * dst_size(r.mode);
    num_tiles_ += tiles(r);
  }
}

void CopyPlan::run(int num_threads) const {
  const bool stream = bytes_ >= kStreamedBytes;
  share(bytes_, kMinBytesPerThread, num_threads, [=](int64_t first, int64_t last) { copy_bytes(rects_, stream, first, last); });
}

void CopyPlan::fill_tables(TiledRect* table, int32_t* rect_of_tile) const {
  int64_t first_tile = 0;
  for (int64_t i = 0; i < num_rects(); ++i) {
    const Rect& r = rects_[static_cast<size_t>(i)];
    *table++ = {r, first_tile};
    first_tile += tiles(r);
    rect_of_tile = std::fill_n(rect_of_tile, tiles(r), static_cast<int32_t>(i));
  }
}

}  // namespace megarl
