// The linear kernels for NEON with the dot product.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cmath>
#include <cstring>

#include "linear_kernels.h"
#include "rounding.h"
#include "target_neon.h"

namespace engine::neon {
namespace {

struct Ints {
  int32x4_t v[4];
};
struct Floats {
  float32x4_t v[4];
};
struct Codes {
  uint8x16_t v[4];
};

constexpr int kIntegerRows = 4, kIntegerTiles = 1, kVectorsAtOnce = 4, kFloatRows = 4, kFloatTiles = 1;
constexpr int kPrefetchBytes = 2048;
constexpr int kPairBytes = 8;

template <int kBytes>
ENGINE_INLINE void prefetch(const uint8_t* p) {
  ENGINE_UNROLL
  for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(p + i);
}

template <class Vector, class Function>
ENGINE_INLINE Vector each(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}

ENGINE_INLINE Floats broadcast(float x) {
  return each<Floats>([=](int) { return vdupq_n_f32(x); });
}
ENGINE_INLINE Ints broadcast(int32_t x) {
  return each<Ints>([=](int) { return vdupq_n_s32(x); });
}
ENGINE_INLINE Floats mul(const Floats& a, const Floats& b) {
  return each<Floats>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
ENGINE_INLINE Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  return each<Floats>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
ENGINE_INLINE Floats to_floats(const Ints& x) {
  return each<Floats>([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
ENGINE_INLINE Floats load_floats(const float* p) {
  return each<Floats>([=](int i) { return vld1q_f32(p + 4 * i); });
}
ENGINE_INLINE Floats load_fp16(const uint8_t* p) {
  return each<Floats>([=](int i) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i)));
  });
}
ENGINE_INLINE void store(float* p, const Floats& x, int count) {
  if (count >= kColumnTile) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.v[i]);
  } else {
    std::memcpy(p, x.v, count * sizeof(float));
  }
}

ENGINE_INLINE Codes load_codes(const uint8_t* p) {
  return each<Codes>([=](int i) { return vld1q_u8(p + 16 * i); });
}
ENGINE_INLINE Codes low_nibbles(const Codes& x) {
  return each<Codes>([&](int i) { return vandq_u8(x.v[i], vdupq_n_u8(15)); });
}
ENGINE_INLINE Codes high_nibbles(const Codes& x) {
  return each<Codes>([&](int i) { return vshrq_n_u8(x.v[i], 4); });
}
ENGINE_INLINE Codes load_table(const uint8_t* p) {
  return each<Codes>([=](int) { return vld1q_u8(p); });
}
ENGINE_INLINE Codes look_up(const Codes& table, const Codes& codes) {
  return each<Codes>([&](int i) { return vqtbl1q_u8(table.v[i], codes.v[i]); });
}
ENGINE_INLINE Codes interleave_low(const Codes& a, const Codes& b) {
  return each<Codes>([&](int i) { return vzip1q_u8(a.v[i], b.v[i]); });
}
ENGINE_INLINE Codes interleave_high(const Codes& a, const Codes& b) {
  return each<Codes>([&](int i) { return vzip2q_u8(a.v[i], b.v[i]); });
}
// codes | (plane shifted left by kShift & kMask), by bytes.
template <int kShift, int kMask>
ENGINE_INLINE Codes or_bits(const Codes& codes, const Codes& plane) {
  return each<Codes>([&](int i) {
    const uint8x16_t shifted = vshlq_u8(plane.v[i], vdupq_n_s8(kShift));
    return vorrq_u8(codes.v[i], vandq_u8(shifted, vdupq_n_u8(kMask)));
  });
}

ENGINE_INLINE Codes shifted_right(const Codes& x, int bits) {
  return each<Codes>([&](int i) { return vshlq_u8(x.v[i], vdupq_n_s8(int8_t(-bits))); });
}

// The dot product is of signed bytes: eight-bit codes have their zero point taken off beforehand.
template <int kZeroPoint>
ENGINE_INLINE Ints of_zero_point(int32_t minus_eight_sums) {
  return broadcast(kZeroPoint == 128 ? 0 : minus_eight_sums * (kZeroPoint / 8));
}
template <int kMaxCode>
ENGINE_INLINE int8x16_t centred(uint8x16_t codes) {
  return vreinterpretq_s8_u8(kMaxCode == 255 ? veorq_u8(codes, vdupq_n_u8(128)) : codes);
}
template <int kMaxCode, int kFirst, int kRows, int kTiles>
ENGINE_INLINE void add_dots(Ints (&sums)[kRows][kTiles], const Codes (&codes)[kTiles][4],
                            const ActivationGroup* const (&group)[kRows]) {
  ENGINE_UNROLL
  for (int r = 0; r < kRows; r++) {
    const int8x16_t sixteen = vld1q_s8(group[r]->q + 4 * kFirst);
    ENGINE_UNROLL
    for (int t = 0; t < kTiles; t++)
      ENGINE_UNROLL
      for (int i = 0; i < 4; i++) {
        int32x4_t& sum = sums[r][t].v[i];
        sum = vdotq_laneq_s32(sum, centred<kMaxCode>(codes[t][0].v[i]), sixteen, 0);
        sum = vdotq_laneq_s32(sum, centred<kMaxCode>(codes[t][1].v[i]), sixteen, 1);
        sum = vdotq_laneq_s32(sum, centred<kMaxCode>(codes[t][2].v[i]), sixteen, 2);
        sum = vdotq_laneq_s32(sum, centred<kMaxCode>(codes[t][3].v[i]), sixteen, 3);
      }
  }
}
template <int kMaxCode, int kRows, int kTiles>
ENGINE_INLINE void add_high_terms(Ints (&sums)[kRows][kTiles], const Codes (&codes)[kTiles], const uint8_t* high,
                                  size_t row_bytes) {
  ENGINE_UNROLL
  for (int r = 0; r < kRows; r++) {
    const int8x16_t four =
        vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(high + r * row_bytes)));
    ENGINE_UNROLL
    for (int t = 0; t < kTiles; t++)
      ENGINE_UNROLL
      for (int i = 0; i < 4; i++) {
        const int32x4_t dots = vdotq_s32(vdupq_n_s32(0), centred<kMaxCode>(codes[t].v[i]), four);
        sums[r][t].v[i] = vaddq_s32(sums[r][t].v[i], vshlq_n_s32(dots, kHighShift));
      }
  }
}
ENGINE_INLINE float32x4_t odd_half(uint8x16_t pairs) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(pairs), vdupq_n_u32(0xffff0000)));
}
ENGINE_INLINE float32x4_t even_half(uint8x16_t pairs) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(pairs), 16));
}
ENGINE_INLINE Floats dot_bf16(const Floats& sum, const Codes& w, const uint8_t* x) {
  float pair[2];
  std::memcpy(pair, x, 8);
  return each<Floats>([&](int i) {
    const float32x4_t odd = vfmaq_n_f32(sum.v[i], odd_half(w.v[i]), pair[1]);
    return vfmaq_n_f32(odd, even_half(w.v[i]), pair[0]);
  });
}

template <bool kIsSplit>
void quantize_group(const float* x, ActivationGroup& group, int8_t* high) {
  uint32_t amax_bits = 0, sum_of_eighths = 0;
  for (int i = 0; i < kGroup; i += 4) {
    const uint32_t four_bits = vmaxvq_u32(vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), vdupq_n_u32(0x7fffffff)));
    amax_bits = four_bits > amax_bits ? four_bits : amax_bits;
    sum_of_eighths += four_bits >> 3;
  }
  const GroupScale scale = kIsSplit ? split_scale(int32_t(amax_bits), int32_t(sum_of_eighths))
                                    : group_scale(int32_t(amax_bits));
  int32_t q[kGroup], sums[2];
  for (int half = 0; half < 2; half++) {
    int32x4_t sum = vdupq_n_s32(0);
    for (int i = 16 * half; i < 16 * half + 16; i += 4) {
      const int32x4_t four = scale.inverse == 0 ? vdupq_n_s32(0)
                                                : vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), scale.inverse));
      vst1q_s32(q + i, four);
      sum = vaddq_s32(sum, four);
    }
    sums[half] = vaddvq_s32(sum);
  }
  set_sums(group, scale, sums[0], sums[1], kIsSplit ? split_outliers(q, high) : 0);
  for (int i = 0; i < kGroup; i += 8) {
    const int16x8_t eight = vcombine_s16(vmovn_s32(vld1q_s32(q + i)), vmovn_s32(vld1q_s32(q + i + 4)));
    vst1_s8(group.q + i, vmovn_s16(eight));
  }
}

void quantize_int8(const float* x, int k, void* out) {
  auto* group = static_cast<ActivationGroup*>(out);
  for (int i = 0; i < k; i += kGroup) quantize_group<false>(x + i, *group++, nullptr);
}

void quantize_int8_split(const float* x, int k, void* out) {
  auto* groups = static_cast<ActivationGroup*>(out);
  auto* high = static_cast<int8_t*>(out) + high_terms_at(k / kGroup);
  for (int g = 0; g < k / kGroup; g++) quantize_group<true>(x + g * kGroup, groups[g], high + g * kGroup);
}

void quantize_bf16(const float* x, int k, void* out) { round_to_bf16(x, k, static_cast<float*>(out)); }

}  // namespace

#include "linear_kernels.inc"

}  // namespace engine::neon
#endif
