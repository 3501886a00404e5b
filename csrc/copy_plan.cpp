#include "copy_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "convert.h"
#include "threads.h"

#ifdef __SSE2__
#include <xmmintrin.h>
#include <emmintrin.h>
#endif

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

// One column after the other of up to 16 rows of a packed destination; dst is the place of the first.
template <typename T>
void pack_columns(const T* src, int64_t src_ld, T* dst, int64_t rows, int64_t cols) {
  for (int64_t col = 0; col < cols; ++col) {
    for (int64_t row = 0; row < rows; ++row) dst[col * kPackRows + row] = src[row * src_ld + col];
  }
}

#ifdef __SSE2__
// 8 columns of 8 rows; dst is 8 of the 16 rows of a block.
void transpose(const uint16_t* src, int64_t src_ld, uint16_t* dst) {
  __m128i a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i * src_ld));
  for (int i = 0; i < 4; ++i) b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]), b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm_unpacklo_epi32(b[i], b[i + 2]), a[i + 1] = _mm_unpackhi_epi32(b[i], b[i + 2]);
    a[i + 2] = _mm_unpacklo_epi32(b[i + 1], b[i + 3]), a[i + 3] = _mm_unpackhi_epi32(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + 2 * i * kPackRows), _mm_unpacklo_epi64(a[i], a[i + 4]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + (2 * i + 1) * kPackRows), _mm_unpackhi_epi64(a[i], a[i + 4]));
  }
}

// 4 columns of 4 rows.
void transpose(const uint32_t* src, int64_t src_ld, uint32_t* dst) {
  __m128 rows[4];
  for (int i = 0; i < 4; ++i) rows[i] = _mm_loadu_ps(reinterpret_cast<const float*>(src + i * src_ld));
  _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]);
  for (int i = 0; i < 4; ++i) _mm_storeu_ps(reinterpret_cast<float*>(dst + i * kPackRows), rows[i]);
}

// The same for whole blocks, 16 bytes at a time.
template <typename T>
void pack_whole_columns(const T* src, int64_t src_ld, T* dst, int64_t cols) {
  constexpr int64_t N = 16 / sizeof(T);
  int64_t col = 0;
  for (; col + N <= cols; col += N) {
    for (int64_t row = 0; row < kPackRows; row += N) transpose(src + row * src_ld + col, src_ld, dst + col * kPackRows + row);
  }
  pack_columns(src + col, src_ld, dst + col * kPackRows, kPackRows, cols - col);
}
#endif

template <typename T>
void pack(const char* src, int64_t src_ld, char* dst, int64_t rows, int64_t cols) {
  auto from = reinterpret_cast<const T*>(src);
  auto to = reinterpret_cast<T*>(dst);
#ifdef __SSE2__
  if constexpr (sizeof(T) == 2 || sizeof(T) == 4) {
    if (rows == kPackRows) return pack_whole_columns(from, src_ld, to, cols);
  }
#endif
  pack_columns(from, src_ld, to, rows, cols);
}

// Columns [first, last) of the `rows` rows from `row` on, which lie in one block of the destination.
void pack_block(const Rect& r, int64_t row, int64_t rows, int64_t first, int64_t last) {
  constexpr int64_t kCols = 64;
  const int64_t mode = element_mode(r.mode), from = src_size(mode), to = dst_size(mode);
  alignas(64) char converted[kPackRows * kCols * 4];
  char* dst = reinterpret_cast<char*>(r.dst) + packed_row_offset(row_in_block(r.dst, to), row, r.dst_ld) * to;
  for (int64_t col = first; col < last; col += kCols) {
    const int64_t cols = std::min(kCols, last - col);
    const char* src = reinterpret_cast<const char*>(r.src) + (row * r.src_ld + col) * from;
    int64_t ld = r.src_ld;
    if (!is_copy(mode)) {
      for (int64_t i = 0; i < rows; ++i) convert_run(mode, src + i * ld * from, converted + i * kCols * to, cols);
      src = converted;
      ld = kCols;
    }
    char* block = dst + col * kPackRows * to;
    switch (to) {
      case 1: pack<uint8_t>(src, ld, block, rows, cols); break;
      case 2: pack<uint16_t>(src, ld, block, rows, cols); break;
      case 4: pack<uint32_t>(src, ld, block, rows, cols); break;
    }
  }
}

// Elements [first, last) in the order in which a packed destination keeps them, in whole columns of a block.
void pack_range(const Rect& r, int64_t first, int64_t last) {
  const int64_t at = row_in_block(r.dst, dst_size(r.mode));
  for (int64_t row = 0; row < r.rows;) {
    const int64_t rows = std::min(kPackRows - (at + row) % kPackRows, r.rows - row), start = row * r.cols;
    const auto column = [&](int64_t element) { return std::clamp<int64_t>((element - start + rows - 1) / rows, 0, r.cols); };
    pack_block(r, row, rows, column(first), column(last));
    row += rows;
  }
}

// Elements [first, last) of the rectangle, counted row by row.
void copy_range(const Rect& r, bool stream, int64_t first, int64_t last) {
  if (is_packed(r.mode)) return pack_range(r, first, last);
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
    if (one_row && !is_packed(r.mode)) r = {r.src, r.dst, 1, r.rows * r.cols, r.rows * r.cols, r.rows * r.cols, r.mode};
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
