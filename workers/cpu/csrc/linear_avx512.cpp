// The linear kernels for AVX-512 with VNNI and BF16.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstring>

#include "linear_kernels.h"
#include "rounding.h"
#include "target_avx512.h"

namespace engine::avx512 {
namespace {

using Ints = __m512i;
using Floats = __m512;
using Codes = __m512i;

constexpr int kIntegerRows = 6, kIntegerTiles = 2, kVectorsAtOnce = 2, kFloatRows = 8, kFloatTiles = 2;
// What a core reads while memory answers, and a few pages more: its own prefetching ends with a page.
constexpr int kPrefetchBytes = 12288;

template <int kBytes>
ENGINE_INLINE void prefetch(const uint8_t* p) {
  ENGINE_UNROLL
  for (int i = 0; i < kBytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

ENGINE_INLINE Floats broadcast(float x) { return _mm512_set1_ps(x); }
ENGINE_INLINE Ints broadcast(int32_t x) { return _mm512_set1_epi32(x); }
ENGINE_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
ENGINE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
ENGINE_INLINE Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
ENGINE_INLINE Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
ENGINE_INLINE Floats load_fp16(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
ENGINE_INLINE void store(float* p, Floats x, int count) {
  if (count >= 16)
    _mm512_storeu_ps(p, x);
  else
    _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), x);
}

ENGINE_INLINE Codes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
ENGINE_INLINE Codes low_nibbles(Codes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
ENGINE_INLINE Codes high_nibbles(Codes x) {
  return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15));
}
// By lanes of 16 bytes: a table in each, and what a code of 0 to 15 stands for.
ENGINE_INLINE Codes load_table(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
ENGINE_INLINE Codes look_up(Codes table, Codes codes) { return _mm512_shuffle_epi8(table, codes); }
// By lanes of 16 bytes: the first, or last, eight of `a` and `b` in turn.
ENGINE_INLINE Codes interleave_low(Codes a, Codes b) { return _mm512_unpacklo_epi8(a, b); }
ENGINE_INLINE Codes interleave_high(Codes a, Codes b) { return _mm512_unpackhi_epi8(a, b); }
// codes | (plane shifted left by kShift & kMask), by bytes.
template <int kShift, int kMask>
ENGINE_INLINE Codes or_bits(Codes codes, Codes plane) {
  const __m512i shifted = kShift >= 0 ? _mm512_slli_epi16(plane, kShift < 0 ? 0 : kShift)
                                      : _mm512_srli_epi16(plane, kShift < 0 ? -kShift : 0);
  return _mm512_ternarylogic_epi32(codes, shifted, _mm512_set1_epi8(kMask), 0xf8);
}

// Whatever its bytes get from their neighbours is in their upper bits.
ENGINE_INLINE Codes shifted_right(Codes x, int bits) { return _mm512_srl_epi16(x, _mm_cvtsi32_si128(bits)); }

// What turns a sum of codes * q into one of (code - kZeroPoint) * q.
template <int kZeroPoint>
ENGINE_INLINE Ints of_zero_point(int32_t minus_eight_sums) {
  return _mm512_slli_epi32(_mm512_set1_epi32(minus_eight_sums), __builtin_ctz(kZeroPoint) - 3);
}
// Four bytes in each lane. Kept in a register: instructions that read them from memory are limited by that.
ENGINE_INLINE __m512i broadcast_four(const void* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  __m512i fours = _mm512_set1_epi32(four);
  asm("" : "+v"(fours));
  return fours;
}
// Adds to each row's sums the dot products of the codes of each column with as many activations.
template <int kMaxCode, int kFirst, int kRows, int kTiles, int kVectors>
ENGINE_INLINE void add_dots(Ints (&sums)[kRows][kTiles], const Codes (&codes)[kTiles][kVectors],
                            const ActivationGroup* const (&group)[kRows]) {
  ENGINE_UNROLL
  for (int v = 0; v < kVectors; v++)
    ENGINE_UNROLL
    for (int r = 0; r < kRows; r++) {
      const __m512i four = broadcast_four(group[r]->q + 4 * (kFirst + v));
      ENGINE_UNROLL
      for (int t = 0; t < kTiles; t++) sums[r][t] = _mm512_dpbusd_epi32(sums[r][t], codes[t][v], four);
    }
}
template <int kMaxCode, int kRows, int kTiles>
ENGINE_INLINE void add_high_terms(Ints (&sums)[kRows][kTiles], Codes (&codes)[kTiles], const uint8_t* high,
                                  size_t row_bytes) {
  constexpr bool kUnitFits = kMaxCode * kHighUnit < 256;
  if (kUnitFits)
    for (Codes& of_tile : codes) of_tile = _mm512_slli_epi16(of_tile, kHighShift);
  ENGINE_UNROLL
  for (int r = 0; r < kRows; r++) {
    const __m512i four = broadcast_four(high + r * row_bytes);
    ENGINE_UNROLL
    for (int t = 0; t < kTiles; t++) {
      Ints& sum = sums[r][t];
      if (kUnitFits)
        sum = _mm512_dpbusd_epi32(sum, codes[t], four);
      else
        sum = _mm512_add_epi32(
            sum, _mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), codes[t], four), kHighShift));
    }
  }
}
// sum + w[1] * x[1], rounded, + w[0] * x[0], rounded, for the pair of each column.
ENGINE_INLINE Floats dot_bf16(Floats sum, Codes w, const uint8_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(pair));
}

ENGINE_INLINE __m512i magnitude_bits(__m512 x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}
ENGINE_INLINE __m512i max_of_fours(__m512i x) {
  x = _mm512_max_epi32(x, _mm512_shuffle_epi32(x, _MM_PERM_BADC));
  return _mm512_max_epi32(x, _mm512_shuffle_epi32(x, _MM_PERM_CDAB));
}
ENGINE_INLINE __m128i max_of_lanes(__m512i x) {
  const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  return _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}
ENGINE_INLINE __m256i bytes_of(__m512i first, __m512i second) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(first)),
                                 _mm512_cvtepi32_epi8(second), 1);
}

ENGINE_INLINE __m128i minus_eight(__m128i x) { return _mm_slli_epi32(_mm_sub_epi32(_mm_setzero_si128(), x), 3); }
// Four neighbouring fields of each of four groups.
ENGINE_INLINE void store_fields(__m128 first, __m128 second, __m128 third, __m128 fourth, ActivationGroup* groups,
                                const int (&group_of)[4], size_t at) {
  _MM_TRANSPOSE4_PS(first, second, third, fourth);
  const __m128 fields[4] = {first, second, third, fourth};
  ENGINE_UNROLL
  for (int i = 0; i < 4; i++)
    _mm_storeu_ps(reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(groups + group_of[i]) + at), fields[i]);
}

// One value of a group a lane. If there are fewer than four groups the last takes the others' place too.
template <bool kIsSplit>
void quantize_four_groups(const float* x, int num_groups, ActivationGroup* groups, int8_t* high) {
  int group_of[4];
  __m512 values[4][2];
  __m128i partial[4], sums[4];
  ENGINE_UNROLL
  for (int i = 0; i < 4; i++) {
    group_of[i] = i < num_groups ? i : num_groups - 1;
    values[i][0] = _mm512_loadu_ps(x + group_of[i] * kGroup);
    values[i][1] = _mm512_loadu_ps(x + group_of[i] * kGroup + 16);
    __m512i first = magnitude_bits(values[i][0]), second = magnitude_bits(values[i][1]);
    if (kIsSplit) {
      first = max_of_fours(first);
      second = max_of_fours(second);
      const __m512i sum = _mm512_add_epi32(_mm512_srli_epi32(first, 3), _mm512_srli_epi32(second, 3));
      const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
      sums[i] = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    }
    partial[i] = max_of_lanes(_mm512_max_epi32(first, second));
  }
  const __m128i pair0 = _mm_max_epi32(_mm_unpacklo_epi32(partial[0], partial[1]),
                                      _mm_unpackhi_epi32(partial[0], partial[1]));
  const __m128i pair1 = _mm_max_epi32(_mm_unpacklo_epi32(partial[2], partial[3]),
                                      _mm_unpackhi_epi32(partial[2], partial[3]));
  const __m128i amax_bits =
      _mm_max_epi32(_mm_unpacklo_epi64(pair0, pair1), _mm_unpackhi_epi64(pair0, pair1));
  const __m128 amax = _mm_castsi128_ps(amax_bits), steps = _mm_set1_ps(127.0f);
  const __mmask8 is_tiny = _mm_cmplt_epi32_mask(amax_bits, _mm_set1_epi32(kTinyBits));
  const __mmask8 is_infinite = _mm_cmpge_epi32_mask(amax_bits, _mm_set1_epi32(kInfinityBits));
  __m128 scale = _mm_maskz_div_ps(__mmask8(~is_tiny), amax, steps);
  __m128 inverse_scale = _mm_maskz_div_ps(__mmask8(~(is_tiny | is_infinite)), steps, amax);
  unsigned has_outliers = 0;
  if (kIsSplit) {
    const __m128i eighths = _mm_unpacklo_epi64(_mm_unpacklo_epi32(sums[0], sums[1]),
                                               _mm_unpacklo_epi32(sums[2], sums[3]));
    const __m128 sum_of_seven = _mm_cvtepi32_ps(_mm_sub_epi32(eighths, _mm_srli_epi32(amax_bits, 3)));
    const __m128 typical = _mm_castsi128_ps(_mm_cvtps_epi32(_mm_mul_ps(sum_of_seven, _mm_set1_ps(kMeanOfSeven))));
    has_outliers = ~(is_tiny | is_infinite) &
                   _mm_cmp_ps_mask(amax, _mm_mul_ps(typical, _mm_set1_ps(kOutlierRatio)), _CMP_GT_OQ);
    const __m128 least = _mm_mul_ps(scale, _mm_set1_ps(1.0f / kHighUnit));
    const __m128 ordinary = _mm_mul_ps(typical, _mm_set1_ps(kOrdinaryRatio / 127.0f));
    scale = _mm_mask_max_ps(scale, __mmask8(has_outliers), ordinary, least);
    inverse_scale = _mm_mask_div_ps(inverse_scale, __mmask8(has_outliers), _mm_set1_ps(1.0f), scale);
  }
  scale = _mm_mask_mov_ps(scale, is_infinite, _mm_castsi128_ps(_mm_set1_epi32(kNaNBits)));
  scale = _mm_mask_mov_ps(scale, is_tiny, _mm_set1_ps(1.0f));
  const __m512 inverse = _mm512_castps128_ps512(inverse_scale);

  __m256i sums_of_4[4];
  uint32_t fours[4] = {};
  ENGINE_UNROLL
  for (int i = 0; i < 4; i++) {
    const __m512 by = _mm512_permutexvar_ps(_mm512_set1_epi32(i), inverse);
    // Infinity and NaN convert to a number that has no magnitude and whose low byte is 0.
    __m512i q0 = _mm512_cvtps_epi32(_mm512_mul_ps(values[i][0], by));
    __m512i q1 = _mm512_cvtps_epi32(_mm512_mul_ps(values[i][1], by));
    sums_of_4[i] = _mm256_setzero_si256();
    if (kIsSplit) {
      __m256i above = _mm256_setzero_si256();
      __mmask16 is_outlier0 = 0, is_outlier1 = 0;
      if (has_outliers >> i & 1) {
        const __m512i most = _mm512_set1_epi32(127), half = _mm512_set1_epi32(kHighUnit / 2);
        is_outlier0 = _mm512_cmpgt_epi32_mask(max_of_fours(_mm512_abs_epi32(q0)), most);
        is_outlier1 = _mm512_cmpgt_epi32_mask(max_of_fours(_mm512_abs_epi32(q1)), most);
        const __m512i above0 = _mm512_maskz_srai_epi32(is_outlier0, _mm512_add_epi32(q0, half), kHighShift);
        const __m512i above1 = _mm512_maskz_srai_epi32(is_outlier1, _mm512_add_epi32(q1, half), kHighShift);
        q0 = _mm512_sub_epi32(q0, _mm512_slli_epi32(above0, kHighShift));
        q1 = _mm512_sub_epi32(q1, _mm512_slli_epi32(above1, kHighShift));
        above = bytes_of(above0, above1);
        sums_of_4[i] = _mm256_slli_epi32(_mm256_dpbusd_epi32(sums_of_4[i], _mm256_set1_epi8(1), above), kHighShift);
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(high + group_of[i] * kGroup), above);
      fours[i] = _pext_u32(uint32_t(is_outlier0) | uint32_t(is_outlier1) << 16, 0x11111111);
    }
    const __m256i q = bytes_of(q0, q1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(groups[group_of[i]].q), q);
    sums_of_4[i] = _mm256_dpbusd_epi32(sums_of_4[i], _mm256_set1_epi8(1), q);
  }
  const __m256i halves = _mm256_hadd_epi32(_mm256_hadd_epi32(sums_of_4[0], sums_of_4[1]),
                                           _mm256_hadd_epi32(sums_of_4[2], sums_of_4[3]));
  const __m128i first = _mm256_castsi256_si128(halves), second = _mm256_extracti128_si256(halves, 1);
  const __m128i sum = _mm_add_epi32(first, second);
  const __m128i scaled_sum = _mm_cvtepu16_epi32((__m128i)_mm_cvtneps_pbh(_mm_mul_ps(scale, _mm_cvtepi32_ps(sum))));
  store_fields(scale, _mm_div_ps(_mm_set1_ps(1.0f), scale), _mm_castsi128_ps(scaled_sum),
               _mm_castsi128_ps(minus_eight(sum)), groups, group_of, offsetof(ActivationGroup, scale));
  const __m128i of_fours = _mm_loadu_si128(reinterpret_cast<const __m128i*>(fours));
  store_fields(_mm_castsi128_ps(minus_eight(first)), _mm_castsi128_ps(minus_eight(second)), _mm_castsi128_ps(of_fours),
               _mm_setzero_ps(), groups, group_of, offsetof(ActivationGroup, minus_eight_sums_of_halves));
}

void quantize_int8(const float* x, int k, void* out) {
  auto* groups = static_cast<ActivationGroup*>(out);
  for (int g = 0; g < k / kGroup; g += 4)
    quantize_four_groups<false>(x + g * kGroup, k / kGroup - g < 4 ? k / kGroup - g : 4, groups + g, nullptr);
}

void quantize_int8_split(const float* x, int k, void* out) {
  auto* groups = static_cast<ActivationGroup*>(out);
  auto* high = static_cast<int8_t*>(out) + high_terms_at(k / kGroup);
  for (int g = 0; g < k / kGroup; g += 4)
    quantize_four_groups<true>(x + g * kGroup, k / kGroup - g < 4 ? k / kGroup - g : 4, groups + g, high + g * kGroup);
}

void quantize_bf16(const float* x, int k, void* out) {
  auto* bits = static_cast<uint16_t*>(out);
  int i = 0;
  for (; i + 16 <= k; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bits + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i)));
  for (; i < k; i++) bits[i] = to_bf16(x[i]);
  if (k % 2) bits[k] = 0;
}

}  // namespace

#include "linear_kernels.inc"

}  // namespace engine::avx512
#endif
