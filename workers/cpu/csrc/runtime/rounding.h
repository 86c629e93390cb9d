// Scalar conversions that all instruction sets use, or with which their vector code must agree bit for bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace engine {
namespace {

inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint16_t load_u16(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}

inline float from_bf16(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }

// Rounds to nearest, ties to even. Subnormal numbers become zeros, as in the bf16 instructions.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffff;
  if (magnitude < 0x00800000) return uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounds activations to bf16, for the sets that multiply bf16 as floats. If k is odd, appends a zero, because
// activations are read in pairs.
inline void round_to_bf16(const float* x, int k, float* out) {
  for (int i = 0; i < k; i++) out[i] = from_bf16(to_bf16(x[i]));
  if (k % 2) out[k] = 0;
}

inline float from_fp16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // An exact multiplication corrects the exponent's bias and normalizes subnormal numbers.
  return from_bits(sign | float_bits(from_bits(magnitude << 13) * 0x1p112f));
}

// Rounds to nearest, ties to even. Numbers above the largest finite value become that value.
inline uint16_t to_fp16(float x) {
  const uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7bff);
  // Adding 0.5 rounds at the last bit of a subnormal fp16 number, which has the value 2^-24.
  if (magnitude < 0x38800000) return uint16_t(sign | (float_bits(from_bits(magnitude) + 0.5f) - float_bits(0.5f)));
  return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

constexpr int32_t kTinyBits = 0x1e3ce508;  // 1e-20f
constexpr int32_t kInfinityBits = 0x7f800000, kNaNBits = 0x7fc00000;

struct GroupScale {
  float scale;
  float inverse;  // 0 if all q of the group are 0
};

// Returns the scale of a group of int8 numbers, given the bits of its largest magnitude. Magnitudes that are too small
// to affect any product count as zero. A NaN or an infinity makes the scale NaN.
inline GroupScale group_scale(int32_t amax_bits) {
  if (amax_bits < kTinyBits) return {0.0f, 0.0f};
  if (amax_bits >= kInfinityBits) return {from_bits(kNaNBits), 0.0f};
  const float amax = from_bits(uint32_t(amax_bits));
  return {amax / 127.0f, 127.0f / amax};
}

}  // namespace
}  // namespace engine
