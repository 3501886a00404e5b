// Rectangles of elements and what may happen to one element, for host and device code.
// Addresses and an opaque stream, no libtorch: one build serves every PyTorch, with or without CUDA.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define MEGARL_HOST_DEVICE __host__ __device__
#else
#define MEGARL_HOST_DEVICE
#endif

namespace megarl {

// What happens to an element. Same-size copies are named by their size in bytes; conversions by two digits, source and
// destination: 1 bfloat16, 2 float16, 3 float32.
enum Mode : int64_t {
  kCopy1 = 1, kCopy2 = 2, kCopy4 = 4, kCopy8 = 8,
  kBfloat16ToFloat16 = 12, kBfloat16ToFloat32 = 13, kFloat16ToBfloat16 = 21,
  kFloat16ToFloat32 = 23, kFloat32ToBfloat16 = 31, kFloat32ToFloat16 = 32,
};

MEGARL_HOST_DEVICE inline bool is_copy(int64_t mode) { return mode < 10; }
MEGARL_HOST_DEVICE inline int64_t src_size(int64_t mode) { return mode < 10 ? mode : mode / 10 == 3 ? 4 : 2; }
MEGARL_HOST_DEVICE inline int64_t dst_size(int64_t mode) { return mode < 10 ? mode : mode % 10 == 3 ? 4 : 2; }
inline bool is_known(int64_t mode) {
  switch (mode) {
    case kCopy1: case kCopy2: case kCopy4: case kCopy8: case kBfloat16ToFloat16: case kBfloat16ToFloat32: case kFloat16ToBfloat16:
    case kFloat16ToFloat32: case kFloat32ToBfloat16: case kFloat32ToFloat16: return true;
  }
  return false;
}
inline const char* known_modes() {
  return "1, 2, 4, 8 (copy), 12, 13, 21, 23, 31, 32 (conversion; 1 bfloat16, 2 float16, 3 float32)";
}

// One row of the int64 [N, 7] array that Python hands over. src, dst: addresses of the first element, in bytes; the rest counts
// elements.
struct Rect {
  int64_t src, dst, rows, cols, src_ld, dst_ld, mode;
};
static_assert(sizeof(Rect) == 7 * sizeof(int64_t));

// Rounding is to nearest, ties to even. A NaN keeps its sign and becomes quiet: rounding its bits could carry it into infinity.
MEGARL_HOST_DEVICE inline uint16_t to_bfloat16(uint32_t bits) {
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(((bits & 0x7fffffffu) > 0x7f800000u ? (bits | 0x400000u) : rounded) >> 16);
}
MEGARL_HOST_DEVICE inline uint32_t bfloat16_to_float32(uint16_t bits) { return static_cast<uint32_t>(bits) << 16; }

MEGARL_HOST_DEVICE inline uint16_t to_float16(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 2^16 and above; 65520 gets there by its carry
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24
    if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);  // below 2^-25
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u, shift = 126u - (magnitude >> 23);
    const uint32_t down = mantissa >> shift, rest = mantissa & ((1u << shift) - 1u), half = 1u << (shift - 1u);
    return static_cast<uint16_t>(sign | (down + (rest > half || (rest == half && (down & 1u)))));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}
MEGARL_HOST_DEVICE inline uint32_t float16_to_float32(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude > 0x7c00u) return sign | 0x7fc00000u | (magnitude << 13);
  if (magnitude == 0x7c00u) return sign | 0x7f800000u;
  if (magnitude >= 0x400u) return sign | ((magnitude << 13) + 0x38000000u);
  const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return sign | bits;
}

}  // namespace megarl
