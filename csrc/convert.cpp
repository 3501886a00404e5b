#include "convert.h"

#include "rect.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define MEGARL_X86 1
#endif

// Compiled twice, the machine picks at load time: conversion with the SSE2 that every x86-64 has is slower than memory.
#if defined(MEGARL_X86) && defined(__GLIBC__) && __has_attribute(target_clones)
#define MEGARL_VECTORIZED __attribute__((target_clones("avx2", "default")))
#else
#define MEGARL_VECTORIZED
#endif

namespace megarl {
namespace {

MEGARL_VECTORIZED void float32_to_bfloat16_run(const uint32_t* src, uint16_t* dst, int64_t count) {
  for (int64_t i = 0; i < count; ++i) dst[i] = to_bfloat16(src[i]);
}

MEGARL_VECTORIZED void bfloat16_to_float32_run(const uint16_t* src, uint32_t* dst, int64_t count) {
  for (int64_t i = 0; i < count; ++i) dst[i] = bfloat16_to_float32(src[i]);
}

#ifdef MEGARL_X86
__attribute__((target("avx,f16c"))) int64_t float32_to_float16_blocks(const uint32_t* src, uint16_t* dst, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 values = _mm256_loadu_ps(reinterpret_cast<const float*>(src + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}

__attribute__((target("avx,f16c"))) int64_t float16_to_float32_blocks(const uint16_t* src, uint32_t* dst, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(reinterpret_cast<float*>(dst + i), _mm256_cvtph_ps(values));
  }
  return i;
}

const bool kHasF16c = __builtin_cpu_supports("f16c");
#else
constexpr bool kHasF16c = false;
int64_t float32_to_float16_blocks(const uint32_t*, uint16_t*, int64_t) { return 0; }
int64_t float16_to_float32_blocks(const uint16_t*, uint32_t*, int64_t) { return 0; }
#endif

void float32_to_float16_run(const uint32_t* src, uint16_t* dst, int64_t count) {
  for (int64_t i = kHasF16c ? float32_to_float16_blocks(src, dst, count) : 0; i < count; ++i) dst[i] = to_float16(src[i]);
}

void float16_to_float32_run(const uint16_t* src, uint32_t* dst, int64_t count) {
  for (int64_t i = kHasF16c ? float16_to_float32_blocks(src, dst, count) : 0; i < count; ++i) dst[i] = float16_to_float32(src[i]);
}

// Between the two 16-bit formats, by way of float32, which holds both exactly: one rounding.
template <typename Widen, typename Round>
void through_float32(Widen widen, Round round, const uint16_t* src, uint16_t* dst, int64_t count) {
  uint32_t wide[1024];
  for (int64_t i = 0; i < count; i += 1024) {
    const int64_t n = count - i < 1024 ? count - i : 1024;
    widen(src + i, wide, n);
    round(wide, dst + i, n);
  }
}

#ifdef MEGARL_X86
#define MEGARL_AVX2 __attribute__((target("avx2,f16c")))

// 32 bytes of the destination.
template <int64_t mode>
MEGARL_AVX2 inline __m256i block_of(const char* src);

template <>
MEGARL_AVX2 inline __m256i block_of<kCopy1>(const char* src) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
}

MEGARL_AVX2 inline __m256i round_to_bfloat16(__m256i bits) {  // to_bfloat16 on eight
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i is_nan = _mm256_cmpgt_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)), _mm256_set1_epi32(0x7f800000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), is_nan), 16);
}

template <>
MEGARL_AVX2 inline __m256i block_of<kFloat32ToBfloat16>(const char* src) {
  const __m256i low = round_to_bfloat16(block_of<kCopy1>(src)), high = round_to_bfloat16(block_of<kCopy1>(src + 32));
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);  // packus interleaves the halves
}

template <>
MEGARL_AVX2 inline __m256i block_of<kBfloat16ToFloat32>(const char* src) {
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src))), 16);
}

template <>
MEGARL_AVX2 inline __m256i block_of<kFloat32ToFloat16>(const char* src) {
  auto values = reinterpret_cast<const float*>(src);
  const __m128i low = _mm256_cvtps_ph(_mm256_loadu_ps(values), _MM_FROUND_TO_NEAREST_INT);
  return _mm256_set_m128i(_mm256_cvtps_ph(_mm256_loadu_ps(values + 8), _MM_FROUND_TO_NEAREST_INT), low);
}

template <>
MEGARL_AVX2 inline __m256i block_of<kFloat16ToFloat32>(const char* src) {
  return _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src))));
}

// `mode` names the code, `real_mode` the sizes: every copy is one of bytes.
template <int64_t mode>
MEGARL_AVX2 void stream_blocks(int64_t real_mode, const char* src, char* dst, int64_t count) {
  const int64_t from = src_size(real_mode), to = dst_size(real_mode), per_block = 32 / to;
  const int64_t before = -reinterpret_cast<intptr_t>(dst) & 31, head = before / to < count ? before / to : count;
  const int64_t blocks = (count - head) / per_block, tail = head + blocks * per_block;
  convert_run(real_mode, src, dst, head);
  for (int64_t i = 0; i < blocks; ++i) {
    const char* at = src + (head + i * per_block) * from;
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + (head + i * per_block) * to), block_of<mode>(at));
  }
  convert_run(real_mode, src + tail * from, dst + tail * to, count - tail);
}

const bool kCanStream = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
#endif

}  // namespace

void convert_run(int64_t mode, const char* src, char* dst, int64_t count) {
  auto src2 = reinterpret_cast<const uint16_t*>(src);
  auto src4 = reinterpret_cast<const uint32_t*>(src);
  auto dst2 = reinterpret_cast<uint16_t*>(dst);
  auto dst4 = reinterpret_cast<uint32_t*>(dst);
  switch (mode) {
    case kFloat32ToBfloat16: return float32_to_bfloat16_run(src4, dst2, count);
    case kBfloat16ToFloat32: return bfloat16_to_float32_run(src2, dst4, count);
    case kFloat32ToFloat16: return float32_to_float16_run(src4, dst2, count);
    case kFloat16ToFloat32: return float16_to_float32_run(src2, dst4, count);
    case kBfloat16ToFloat16: return through_float32(bfloat16_to_float32_run, float32_to_float16_run, src2, dst2, count);
    case kFloat16ToBfloat16: return through_float32(float16_to_float32_run, float32_to_bfloat16_run, src2, dst2, count);
    default: std::memcpy(dst, src, static_cast<size_t>(count * mode));
  }
}

void stream_run(int64_t mode, const char* src, char* dst, int64_t count) {
#ifdef MEGARL_X86
  if (kCanStream) {
    switch (mode) {
      case kFloat32ToBfloat16: return stream_blocks<kFloat32ToBfloat16>(mode, src, dst, count);
      case kBfloat16ToFloat32: return stream_blocks<kBfloat16ToFloat32>(mode, src, dst, count);
      case kFloat32ToFloat16: return stream_blocks<kFloat32ToFloat16>(mode, src, dst, count);
      case kFloat16ToFloat32: return stream_blocks<kFloat16ToFloat32>(mode, src, dst, count);
      case kCopy1: case kCopy2: case kCopy4: case kCopy8: return stream_blocks<kCopy1>(mode, src, dst, count);
    }
  }
#endif
  convert_run(mode, src, dst, count);
}

void stream_fence() {
#ifdef MEGARL_X86
  _mm_sfence();
#endif
}

}  // namespace megarl
