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

}  // namespace megarl
