// 64-bit digests of rectangles, by value and not by place: both ends of a copy get the same number.
//
// A rectangle [rows, cols] is read as words of 8 bytes: each row begins a new word, its last one is padded with zeros, and word i of
// the rectangle counts through all rows. The digest is a sum over words, so no order of work changes it:
//
//   digest = mix(sum_i term(word_i, i, seed) + rows * kRows + cols * kCols + element size + seed)
//
// The full digest sums all words; the sampled one a word out of each of 16 equal stretches, drawn by the seed (all, if there are no
// more than 16). Elements are digested as what they become at their destination. megarl/reshard/digest.py has the same in PyTorch.
#pragma once
#include <cstdint>

#include "rect.h"

namespace megarl {

// One row of an int64 [N, 5] array: what is digested. `mode` says what the elements at `address` become.
struct View {
  int64_t address, rows, cols, ld, mode;
};
static_assert(sizeof(View) == 5 * sizeof(int64_t));

constexpr int64_t kSamples = 16;  // 32 float32 elements, or 64 of 16 bits; each is a cache miss, which is what a digest costs
constexpr uint64_t kWeyl = 0x9e3779b97f4a7c15u, kRows = 0xbf58476d1ce4e5b9u, kCols = 0x94d049bb133111ebu;

// The finalizer of SplitMix64 (Steele, Lea and Flood 2014).
MEGARL_HOST_DEVICE inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
// One step of XXH3's accumulation, with a key that tells places apart.
MEGARL_HOST_DEVICE inline uint64_t term(uint64_t word, uint64_t index, uint64_t seed) {
  const uint64_t x = word ^ ((index + 1) * kWeyl + seed);
  return (x & 0xffffffffu) * (x >> 32) + word;
}
MEGARL_HOST_DEVICE inline uint64_t finish(uint64_t sum, const View& view, uint64_t seed) {
  const auto rows = static_cast<uint64_t>(view.rows), cols = static_cast<uint64_t>(view.cols);
  return mix(sum + rows * kRows + cols * kCols + static_cast<uint64_t>(dst_size(view.mode)) + seed);
}
MEGARL_HOST_DEVICE inline int64_t elements_per_word(const View& view) { return 8 / dst_size(view.mode); }
MEGARL_HOST_DEVICE inline int64_t words_per_row(const View& view) {
  return (view.cols + elements_per_word(view) - 1) / elements_per_word(view);
}
MEGARL_HOST_DEVICE inline int64_t num_words(const View& view) { return view.rows * words_per_row(view); }

// Word of sample s, 0 <= s < min(words, kSamples): in [s, s + 1) / kSamples of the words.
MEGARL_HOST_DEVICE inline int64_t sampled_word(int64_t words, int64_t s, uint64_t seed) {
  if (words <= kSamples) return s;
  // words * s / kSamples without leaving 64 bits
  const auto bound = [words](int64_t part) { return words / kSamples * part + words % kSamples * part / kSamples; };
  const int64_t first = bound(s), length = bound(s + 1) - first;
  return first + static_cast<int64_t>(mix(seed + static_cast<uint64_t>(s) * kWeyl) >> 1) % length;
}

// A View and the number of tiles before it: what the CUDA kernel reads, int64 [N, 6].
struct TiledView {
  View view;
  int64_t first_tile;
};
static_assert(sizeof(TiledView) == 6 * sizeof(int64_t));
constexpr int64_t kTileWords = 1 << 12;
MEGARL_HOST_DEVICE inline int64_t num_tiles(const View& view) { return (num_words(view) + kTileWords - 1) / kTileWords; }

// Throws std::invalid_argument naming the index of the first bad view.
void check(const View* views, int64_t count);
// One digest per view into `digests`.
void digest_full(const View* views, int64_t count, uint64_t seed, int num_threads, uint64_t* digests);
void digest_sampled(const View* views, int64_t count, uint64_t seed, int num_threads, uint64_t* digests);
// Turns sums over words into digests, in place.
void finish_sums(const View* views, int64_t count, uint64_t seed, uint64_t* sums);

// Adds the sums over words to `sums`, zeros on the device; returns a cudaError_t. `table` and `view_of_tile`, an entry per tile, are
// there too; `stream` is a cudaStream_t.
int sum_cuda(const TiledView* table, const int32_t* view_of_tile, int64_t num_views, int64_t num_tiles, uint64_t seed, bool sampled,
             uint64_t* sums, void* stream);

}  // namespace megarl
