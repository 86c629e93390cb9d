// Scalar conversions that every instruction set shares, or must agree with.
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

// To the nearest, ties to even; subnormals become zeros, as the bf16 instructions have it.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffff;
  if (magnitude < 0x00800000) return uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// As the sets take activations for bf16 weights that have no instruction for these; one more if k is odd.
inline void round_to_bf16(const float* x, int k, float* out) {
  for (int i = 0; i < k; i++) out[i] = from_bf16(to_bf16(x[i]));
  if (k % 2) out[k] = 0;
}

inline float from_fp16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // The exponent's bias is made up for by an exact product, which also normalises subnormals.
  return from_bits(sign | float_bits(from_bits(magnitude << 13) * 0x1p112f));
}

// To the nearest, ties to even; beyond the largest finite value, that value.
inline uint16_t to_fp16(float x) {
  const uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7bff);
  // Adding 2^(e + 13) for the exponent e of the last bit kept rounds there.
  if (magnitude < 0x38800000)
    return uint16_t(sign | (float_bits(from_bits(magnitude) + 0.5f) - float_bits(0.5f)));
  return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

constexpr int32_t kTinyBits = 0x1e3ce508;  // 1e-20f
constexpr int32_t kInfinityBits = 0x7f800000, kNaNBits = 0x7fc00000;

struct GroupScale {
  float scale;
  float inverse;  // 0: all q of the group are 0
};

// From the bits of the largest magnitude of a group. Magnitudes that no product could tell from zero
// count as zero; a NaN or an infinity makes the scale NaN.
inline GroupScale group_scale(int32_t amax_bits) {
  if (amax_bits < kTinyBits) return {0.0f, 0.0f};
  if (amax_bits >= kInfinityBits) return {from_bits(kNaNBits), 0.0f};
  const float amax = from_bits(uint32_t(amax_bits));
  return {amax / 127.0f, 127.0f / amax};
}

}  // namespace
}  // namespace engine
