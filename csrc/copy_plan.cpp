#include "copy_plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>

namespace megarl {
namespace {

constexpr int64_t kMaxBytes = std::numeric_limits<int64_t>::max() / 16;
constexpr int64_t kMinBytesPerThread = 1 << 18;  // below this, starting a thread costs more than the copy

bool known(int64_t mode) {
  return mode == kCopy1 || mode == kCopy2 || mode == kCopy4 || mode == kCopy8 || mode == kBfloat16ToFloat32 || mode == kFloat32ToBfloat16;
}

void require(bool ok, int64_t index, const std::string& message) {
  if (!ok) throw std::invalid_argument("rect " + std::to_string(index) + ": " + message);
}

void check(const Rect& r, int64_t index) {
  const auto str = [](int64_t value) { return " (" + std::to_string(value) + ")"; };
  require(known(r.mode), index, "mode" + str(r.mode) + " must be 1, 2, 4, 8 (copy), 24 (bfloat16 to float32) or 42 (float32 to bfloat16)");
  require(r.rows >= 0, index, "rows" + str(r.rows) + " must be >= 0");
  require(r.cols >= 0, index, "cols" + str(r.cols) + " must be >= 0");
  require(r.src_ld >= r.cols, index, "src_ld" + str(r.src_ld) + " must be >= cols" + str(r.cols));
  require(r.dst_ld >= r.cols, index, "dst_ld" + str(r.dst_ld) + " must be >= cols" + str(r.cols));
  if (r.rows == 0 || r.cols == 0) return;
  require(std::max(r.src_ld, r.dst_ld) <= kMaxBytes / r.rows, index, "rows" + str(r.rows) + " x leading dimension must fit in 63 bits of bytes");
  require(r.src > 0 && r.src % src_size(r.mode) == 0, index, "src" + str(r.src) + " must be an address aligned to its elements");
  require(r.dst > 0 && r.dst % dst_size(r.mode) == 0, index, "dst" + str(r.dst) + " must be an address aligned to its elements");
}

// Compiled twice, the machine picks at load time: conversion with the SSE2 that every x86-64 has is slower than memory.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __has_attribute(target_clones)
#define MEGARL_VECTORIZED __attribute__((target_clones("avx2", "default")))
#else
#define MEGARL_VECTORIZED
#endif

MEGARL_VECTORIZED void float32_to_bfloat16(const uint32_t* src, uint16_t* dst, int64_t count) {
  for (int64_t i = 0; i < count; ++i) dst[i] = to_bfloat16(src[i]);
}

MEGARL_VECTORIZED void bfloat16_to_float32(const uint16_t* src, uint32_t* dst, int64_t count) {
  for (int64_t i = 0; i < count; ++i) dst[i] = to_float32(src[i]);
}

// `count` neighbouring elements.
void copy_run(int64_t mode, const char* src, char* dst, int64_t count) {
  if (mode == kFloat32ToBfloat16) float32_to_bfloat16(reinterpret_cast<const uint32_t*>(src), reinterpret_cast<uint16_t*>(dst), count);
  else if (mode == kBfloat16ToFloat32) bfloat16_to_float32(reinterpret_cast<const uint16_t*>(src), reinterpret_cast<uint32_t*>(dst), count);
  else std::memcpy(dst, src, static_cast<size_t>(count * mode));
}

// Elements [first, last) of the rectangle, counted row by row.
void copy_range(const Rect& r, int64_t first, int64_t last) {
  auto src = reinterpret_cast<const char*>(r.src);
  auto dst = reinterpret_cast<char*>(r.dst);
  int64_t row = first / r.cols, col = first % r.cols;
  while (first < last) {
    const int64_t count = std::min(r.cols - col, last - first);
    copy_run(r.mode, src + (row * r.src_ld + col) * src_size(r.mode), dst + (row * r.dst_ld + col) * dst_size(r.mode), count);
    first += count;
    ++row;
    col = 0;
  }
}

// Bytes [first, last) of everything the plan writes, so that threads share evenly whatever the sizes of the rectangles.
void copy_bytes(const std::vector<Rect>& rects, int64_t first, int64_t last) {
  int64_t before = 0;
  for (const Rect& r : rects) {
    const int64_t size = dst_size(r.mode), elements = r.rows * r.cols;
    const auto element = [&](int64_t byte) { return std::clamp<int64_t>((byte - before + size - 1) / size, 0, elements); };
    const int64_t from = element(first), to = element(last);
    if (from < to) copy_range(r, from, to);
    before += elements * size;
    if (before >= last) return;
  }
}

struct Threads : std::vector<std::thread> {
  ~Threads() {
    for (std::thread& thread : *this) thread.join();
  }
};

}  // namespace

CopyPlan::CopyPlan(const Rect* rects, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    Rect r = rects[i];
    check(r, i);
    if (r.rows == 0 || r.cols == 0) continue;
    if (r.rows == 1 || (r.src_ld == r.cols && r.dst_ld == r.cols)) r = {r.src, r.dst, 1, r.rows * r.cols, r.rows * r.cols, r.rows * r.cols, r.mode};
    rects_.push_back(r);
    require(r.rows * r.cols <= (kMaxBytes - bytes_) / dst_size(r.mode), i, "the plan must write less than 63 bits of bytes");
    bytes_ += r.rows * r.cols * dst_size(r.mode);
    num_tiles_ += (r.rows * r.cols + kTileElements - 1) / kTileElements;
  }
}

void CopyPlan::run(int num_threads) const {
  if (num_threads < 1) throw std::invalid_argument("num_threads (" + std::to_string(num_threads) + ") must be >= 1");
  const int64_t parts = std::clamp<int64_t>(bytes_ / kMinBytesPerThread, 1, num_threads);
  const auto bound = [&](int64_t part) { return bytes_ / parts * part + bytes_ % parts * part / parts; };
  Threads threads;
  for (int64_t part = 1; part < parts; ++part) threads.emplace_back([this, part, bound] { copy_bytes(rects_, bound(part), bound(part + 1)); });
  copy_bytes(rects_, 0, bound(1));
}

void CopyPlan::fill_table(TiledRect* table) const {
  int64_t first_tile = 0;
  for (const Rect& r : rects_) {
    *table++ = {r, first_tile};
    first_tile += (r.rows * r.cols + kTileElements - 1) / kTileElements;
  }
}

}  // namespace megarl
