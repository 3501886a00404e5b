#include "digest.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "convert.h"
#include "threads.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define MEGARL_X86 1
#endif

namespace megarl {
namespace {

constexpr int64_t kBufferWords = 512;  // stays in the first-level cache
constexpr int64_t kMinWordsPerThread = 1 << 15;
constexpr int64_t kMinViewsPerThread = 1 << 10;  // sampled: a millisecond; for less, waking a thread on a busy machine costs more
constexpr int64_t kViewsAhead = 4;  // whose samples are on their way

uint64_t load(const char* bytes, int64_t count = 8) {
  uint64_t word = 0;  // the first byte is the lowest: every machine that runs this is little-endian
  std::memcpy(&word, bytes, static_cast<size_t>(count));
  return word;
}

#ifdef MEGARL_X86
__attribute__((target("avx2"))) uint64_t sum_blocks(const char* bytes, int64_t blocks, uint64_t index, uint64_t seed) {
  const auto key = [&](uint64_t lane) { return static_cast<int64_t>((index + lane + 1) * kWeyl + seed); };
  const __m256i step = _mm256_set1_epi64x(static_cast<int64_t>(8 * kWeyl));
  __m256i keys[2] = {_mm256_set_epi64x(key(3), key(2), key(1), key(0)), _mm256_set_epi64x(key(7), key(6), key(5), key(4))};
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i < blocks; ++i) {
    for (int half = 0; half < 2; ++half) {
      const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + 64 * i + 32 * half));
      const __m256i x = _mm256_xor_si256(words, keys[half]);
      const __m256i terms = _mm256_add_epi64(_mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)), words);
      sums[half] = _mm256_add_epi64(sums[half], terms);
      keys[half] = _mm256_add_epi64(keys[half], step);
    }
  }
  uint64_t lanes[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(sums[0], sums[1]));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

const bool kHasAvx2 = __builtin_cpu_supports("avx2");
#else
constexpr bool kHasAvx2 = false;
uint64_t sum_blocks(const char*, int64_t, uint64_t, uint64_t) { return 0; }
#endif

// Terms of `count` words that lie side by side; `index` is that of the first.
uint64_t sum_words(const char* bytes, int64_t count, uint64_t index, uint64_t seed) {
  const int64_t blocks = kHasAvx2 ? count / 8 : 0;
  uint64_t sum = blocks ? sum_blocks(bytes, blocks, index, seed) : 0;
  for (int64_t i = 8 * blocks; i < count; ++i) sum += term(load(bytes + 8 * i), index + static_cast<uint64_t>(i), seed);
  return sum;
}

// Words [first, first + count) of one row, converted into `buffer`, which has room for them.
void read_words(const View& view, int64_t row, int64_t first, int64_t count, char* buffer) {
  const int64_t per_word = elements_per_word(view), col = first * per_word, elements = std::min(count * per_word, view.cols - col);
  std::memset(buffer + 8 * (count - 1), 0, 8);
  auto base = reinterpret_cast<const char*>(view.address);
  convert_run(view.mode, base + (row * view.ld + col) * src_size(view.mode), buffer, elements);
}

// Terms of words [first, last) of one row.
uint64_t sum_row(const View& view, int64_t row, int64_t first, int64_t last, uint64_t seed) {
  const auto index = [&](int64_t word) { return static_cast<uint64_t>(row * words_per_row(view) + word); };
  uint64_t sum = 0;
  if (is_copy(view.mode)) {
    const int64_t whole = std::min(last, view.cols / elements_per_word(view));
    auto bytes = reinterpret_cast<const char*>(view.address) + row * view.ld * src_size(view.mode);
    if (first < whole) sum += sum_words(bytes + 8 * first, whole - first, index(first), seed);
    first = std::max(first, whole);
  }
  char buffer[8 * kBufferWords];
  for (int64_t word = first; word < last; word += kBufferWords) {
    const int64_t count = std::min(kBufferWords, last - word);
    read_words(view, row, word, count, buffer);
    sum += sum_words(buffer, count, index(word), seed);
  }
  return sum;
}

// Terms of words [first, last) of a view.
uint64_t sum_range(const View& view, int64_t first, int64_t last, uint64_t seed) {
  const int64_t per_row = words_per_row(view);
  uint64_t sum = 0;
  for (int64_t row = first / per_row, word = first % per_row; first < last; ++row, word = 0) {
    const int64_t count = std::min(per_row - word, last - first);
    sum += sum_row(view, row, word, word + count, seed);
    first += count;
  }
  return sum;
}

// Rows without gaps whose words do not straddle them are one row: the same words under the same numbers.
View as_long_row(const View& view) {
  const bool together = view.ld == view.cols && view.cols % elements_per_word(view) == 0;
  return together ? View{view.address, 1, view.rows * view.cols, view.rows * view.cols, view.mode} : view;
}

// The sampled words of one view.
struct Samples {
  View view;
  int64_t count;
  struct {
    int64_t index, row, word;  // number in the view, its row, number in the row
    const char* bytes;
  } words[kSamples];
};

// Nearly every sample misses the caches and the table of pages, so it is asked for long before it is read.
void choose(const View& original, uint64_t seed, Samples& samples) {
  const View view = as_long_row(original);
  const int64_t from = src_size(view.mode), per_word = elements_per_word(view), per_row = words_per_row(view), words = view.rows * per_row;
  samples.view = view;
  samples.count = std::min(words, kSamples);
  for (int64_t s = 0; s < samples.count; ++s) {
    const int64_t index = sampled_word(words, s, seed), row = view.rows == 1 ? 0 : index / per_row, word = index - row * per_row;
    const char* bytes = reinterpret_cast<const char*>(view.address) + (row * view.ld + word * per_word) * from;
    __builtin_prefetch(bytes);
    samples.words[s] = {index, row, word, bytes};
  }
}

uint64_t sum(const Samples& samples, uint64_t seed) {
  const View& view = samples.view;
  const bool as_it_lies = is_copy(view.mode);
  const int64_t row_bytes = view.cols * src_size(view.mode);
  uint64_t sum = 0;
  for (int64_t s = 0; s < samples.count; ++s) {
    const auto& [index, row, word, bytes] = samples.words[s];
    char converted[8];
    if (!as_it_lies) read_words(view, row, word, 1, converted);
    sum += term(as_it_lies ? load(bytes, std::min<int64_t>(8, row_bytes - 8 * word)) : load(converted), static_cast<uint64_t>(index), seed);
  }
  return sum;
}

void require(bool ok, int64_t index, const std::string& message) {
  if (!ok) throw std::invalid_argument("view " + std::to_string(index) + ": " + message);
}

}  // namespace

void check(const View* views, int64_t count) {
  constexpr int64_t kMaxBytes = int64_t{1} << 59;
  for (int64_t i = 0; i < count; ++i) {
    const View& v = views[i];
    require(is_known(v.mode), i, "mode (" + std::to_string(v.mode) + ") must be " + known_modes());
    require(v.rows >= 0 && v.cols >= 0 && v.ld >= v.cols, i, "rows and cols must be >= 0 and ld >= cols");
    if (v.rows == 0 || v.cols == 0) continue;
    require(v.ld <= kMaxBytes / v.rows, i, "rows x ld must fit in 59 bits of bytes");
    require(v.address > 0 && v.address % src_size(v.mode) == 0, i, "the address must be aligned to its elements");
  }
}

void digest_full(const View* views, int64_t count, uint64_t seed, int num_threads, uint64_t* digests) {
  std::vector<View> merged;
  for (int64_t i = 0; i < count; ++i) merged.push_back(as_long_row(views[i]));
  int64_t total = 0;
  for (const View& view : merged) total += num_words(view);
  std::vector<std::atomic<uint64_t>> sums(merged.size());  // zeros
  share(total, kMinWordsPerThread, num_threads, [&](int64_t first, int64_t last) {
    int64_t before = 0;
    for (size_t i = 0; i < merged.size() && before < last; ++i) {
      const int64_t words = num_words(merged[i]);
      const int64_t from = std::clamp<int64_t>(first - before, 0, words), to = std::clamp<int64_t>(last - before, 0, words);
      if (from < to) sums[i] += sum_range(merged[i], from, to, seed);
      before += words;
    }
  });
  std::copy(sums.begin(), sums.end(), digests);
  finish_sums(views, count, seed, digests);
}

void finish_sums(const View* views, int64_t count, uint64_t seed, uint64_t* sums) {
  for (int64_t i = 0; i < count; ++i) sums[i] = finish(sums[i], views[i], seed);
}

void digest_sampled(const View* views, int64_t count, uint64_t seed, int num_threads, uint64_t* digests) {
  share(count, kMinViewsPerThread, num_threads, [=](int64_t first, int64_t last) {
    Samples ring[kViewsAhead];
    for (int64_t i = first; i < last + kViewsAhead; ++i) {
      const int64_t ready = i - kViewsAhead;
      if (ready >= first) digests[ready] = finish(sum(ring[ready % kViewsAhead], seed), views[ready], seed);
      if (i < last) choose(views[i], seed, ring[i % kViewsAhead]);
    }
  });
}

}  // namespace megarl
