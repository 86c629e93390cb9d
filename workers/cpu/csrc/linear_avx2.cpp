// The linear kernels for AVX2 with FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "linear_kernels.h"
#include "rounding.h"
#include "target_avx2.h"

namespace engine::avx2 {
namespace {

struct Ints {
  __m256i low, high;
};
struct Floats {
  __m256 low, high;
};
struct Codes {
  __m256i low, high;
};

constexpr int kIntegerRows = 4, kIntegerTiles = 1, kVectorsAtOnce = 4, kFloatRows = 4, kFloatTiles = 1;
constexpr int kPrefetchBytes = 2048;
constexpr int kPairBytes = 8;

template <int kBytes>
ENGINE_INLINE void prefetch(const uint8_t* p) {
  ENGINE_UNROLL
  for (int i = 0; i < kBytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

ENGINE_INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

ENGINE_INLINE Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ENGINE_INLINE Ints broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
ENGINE_INLINE Ints add(Ints a, Ints b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
ENGINE_INLINE Floats mul(Floats a, Floats b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
ENGINE_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
ENGINE_INLINE Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
ENGINE_INLINE Floats load_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ENGINE_INLINE Floats load_fp16(const uint8_t* p) {
  const __m256i halves = load(p);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
ENGINE_INLINE void store(float* p, Floats x, int count) {
  if (count >= 16) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
  } else {
    float values[kColumnTile];
    store(values, x, kColumnTile);
    std::memcpy(p, values, count * sizeof(float));
  }
}

ENGINE_INLINE Codes load_codes(const uint8_t* p) { return {load(p), load(p + 32)}; }
ENGINE_INLINE Codes low_nibbles(Codes x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.low, mask), _mm256_and_si256(x.high, mask)};
}
ENGINE_INLINE Codes high_nibbles(Codes x) {
  return low_nibbles({_mm256_srli_epi16(x.low, 4), _mm256_srli_epi16(x.high, 4)});
}
ENGINE_INLINE Codes load_table(const uint8_t* p) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {table, table};
}
ENGINE_INLINE Codes look_up(Codes table, Codes codes) {
  return {_mm256_shuffle_epi8(table.low, codes.low), _mm256_shuffle_epi8(table.high, codes.high)};
}
ENGINE_INLINE Codes interleave_low(Codes a, Codes b) {
  return {_mm256_unpacklo_epi8(a.low, b.low), _mm256_unpacklo_epi8(a.high, b.high)};
}
ENGINE_INLINE Codes interleave_high(Codes a, Codes b) {
  return {_mm256_unpackhi_epi8(a.low, b.low), _mm256_unpackhi_epi8(a.high, b.high)};
}
template <int kShift, int kMask>
ENGINE_INLINE __m256i or_bits(__m256i codes, __m256i plane) {
  const __m256i shifted = kShift >= 0 ? _mm256_slli_epi16(plane, kShift < 0 ? 0 : kShift)
                                      : _mm256_srli_epi16(plane, kShift < 0 ? -kShift : 0);
  return _mm256_or_si256(codes, _mm256_and_si256(shifted, _mm256_set1_epi8(kMask)));
}
template <int kShift, int kMask>
ENGINE_INLINE Codes or_bits(Codes codes, Codes plane) {
  return {or_bits<kShift, kMask>(codes.low, plane.low), or_bits<kShift, kMask>(codes.high, plane.high)};
}

// Whatever its bytes get from their neighbours is in their upper bits.
ENGINE_INLINE Codes shifted_right(Codes x, int bits) {
  const __m128i count = _mm_cvtsi32_si128(bits);
  return {_mm256_srl_epi16(x.low, count), _mm256_srl_epi16(x.high, count)};
}

template <int kZeroPoint>
ENGINE_INLINE Ints of_zero_point(int32_t minus_eight_sums) {
  return broadcast(kZeroPoint == 128 ? 0 : minus_eight_sums * (kZeroPoint / 8));
}
// Sums of two products of eight-bit codes do not fit in 16 bits: the zero point of these is taken off
// the codes beforehand, not off the sum.
template <int kMaxCode>
ENGINE_INLINE __m256i pairs(__m256i codes, __m256i q) {
  if (kMaxCode < 255) return _mm256_maddubs_epi16(codes, q);
  const __m256i centred = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
  return _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(q, centred));
}
ENGINE_INLINE __m256i broadcast_four(const void* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  return _mm256_set1_epi32(four);
}
template <int kMaxCode>
ENGINE_INLINE __m256i dot16(__m256i start, const __m256i (&codes)[4], const __m256i (&q)[4]) {
  const __m256i ones = _mm256_set1_epi16(1);
  // As many sums of pairs as 16 bits hold are added before they are widened.
  constexpr int kAtOnce = kMaxCode == 255 ? 1 : kMaxCode == 63 ? 2 : 4;
  static_assert(kMaxCode == 255 || 2 * 127 * kMaxCode * kAtOnce < 32768, "sums overflow");
  ENGINE_UNROLL
  for (int i = 0; i < 4; i += kAtOnce) {
    __m256i sum = pairs<kMaxCode>(codes[i], q[i]);
    ENGINE_UNROLL
    for (int j = 1; j < kAtOnce; j++)
      sum = _mm256_add_epi16(sum, pairs<kMaxCode>(codes[i + j], q[i + j]));
    start = _mm256_add_epi32(start, _mm256_madd_epi16(sum, ones));
  }
  return start;
}
template <int kMaxCode, int kFirst, int kRows, int kTiles>
ENGINE_INLINE void add_dots(Ints (&sums)[kRows][kTiles], const Codes (&codes)[kTiles][4],
                            const ActivationGroup* const (&group)[kRows]) {
  ENGINE_UNROLL
  for (int t = 0; t < kTiles; t++) {
    __m256i low[4], high[4];
    ENGINE_UNROLL
    for (int i = 0; i < 4; i++) {
      low[i] = codes[t][i].low;
      high[i] = codes[t][i].high;
    }
    ENGINE_UNROLL
    for (int r = 0; r < kRows; r++) {
      __m256i fours[4];
      ENGINE_UNROLL
      for (int i = 0; i < 4; i++) fours[i] = broadcast_four(group[r]->q + 4 * (kFirst + i));
      Ints& sum = sums[r][t];
      sum = {dot16<kMaxCode>(sum.low, low, fours), dot16<kMaxCode>(sum.high, high, fours)};
    }
  }
}
template <int kMaxCode, int kRows, int kTiles>
ENGINE_INLINE void add_high_terms(Ints (&sums)[kRows][kTiles], const Codes (&codes)[kTiles], const uint8_t* high,
                                  size_t row_bytes) {
  const __m256i units = _mm256_set1_epi16(kHighUnit);
  ENGINE_UNROLL
  for (int r = 0; r < kRows; r++) {
    const __m256i four = broadcast_four(high + r * row_bytes);
    ENGINE_UNROLL
    for (int t = 0; t < kTiles; t++)
      sums[r][t] = add(sums[r][t], {_mm256_madd_epi16(pairs<kMaxCode>(codes[t].low, four), units),
                                    _mm256_madd_epi16(pairs<kMaxCode>(codes[t].high, four), units)});
  }
}
ENGINE_INLINE Floats odd_halves(Codes x) {
  const __m256i upper = _mm256_set1_epi32(-65536);
  return {_mm256_castsi256_ps(_mm256_and_si256(x.low, upper)),
          _mm256_castsi256_ps(_mm256_and_si256(x.high, upper))};
}
ENGINE_INLINE Floats even_halves(Codes x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.low, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(x.high, 16))};
}
ENGINE_INLINE Floats dot_bf16(Floats sum, Codes w, const uint8_t* x) {
  float pair[2];
  std::memcpy(pair, x, 8);
  return fma(even_halves(w), broadcast(pair[0]), fma(odd_halves(w), broadcast(pair[1]), sum));
}

ENGINE_INLINE int32_t sum_of(__m256i x) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

ENGINE_INLINE __m256i max_of_fours(__m256i x) {
  x = _mm256_max_epi32(x, _mm256_shuffle_epi32(x, 0x4e));
  return _mm256_max_epi32(x, _mm256_shuffle_epi32(x, 0xb1));
}

template <bool kIsSplit>
void quantize_group(const float* x, ActivationGroup& group, int8_t* high) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i amax = _mm256_setzero_si256(), eighths = _mm256_setzero_si256();
  for (int i = 0; i < 4; i++) {
    const __m256i fours = max_of_fours(_mm256_and_si256(load(x + 8 * i), magnitude));
    amax = _mm256_max_epi32(amax, fours);
    eighths = _mm256_add_epi32(eighths, _mm256_srli_epi32(fours, 3));
  }
  const int32_t amax_bits = _mm_cvtsi128_si32(
      _mm_max_epi32(_mm256_castsi256_si128(amax), _mm256_extracti128_si256(amax, 1)));
  const int32_t sum_of_eighths = _mm_cvtsi128_si32(
      _mm_add_epi32(_mm256_castsi256_si128(eighths), _mm256_extracti128_si256(eighths, 1)));
  const GroupScale scale = kIsSplit ? split_scale(amax_bits, sum_of_eighths) : group_scale(amax_bits);
  __m256i q[4];
  for (int i = 0; i < 4; i++)
    q[i] = scale.inverse == 0 ? _mm256_setzero_si256()
                              : _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i),
                                                                 _mm256_set1_ps(scale.inverse)));
  const int32_t first = sum_of(_mm256_add_epi32(q[0], q[1])), second = sum_of(_mm256_add_epi32(q[2], q[3]));
  unsigned fours = 0;
  if (kIsSplit) {
    alignas(32) int32_t all[kGroup];
    for (int i = 0; i < 4; i++) _mm256_store_si256(reinterpret_cast<__m256i*>(all + 8 * i), q[i]);
    fours = split_outliers(all, high);
    for (int i = 0; i < 4; i++) q[i] = load(all + 8 * i);
  }
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(group.q),
                      _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  set_sums(group, scale, first, second, fours);
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

}  // namespace engine::avx2
#endif
