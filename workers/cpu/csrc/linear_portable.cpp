// The linear kernels in standard C++: correct everywhere, and what every other set is tested against.
#include <cmath>
#include <cstring>

#include "linear_kernels.h"
#include "rounding.h"

namespace engine::portable {
namespace {

struct Ints {
  int32_t v[kColumnTile];
};
struct Floats {
  float v[kColumnTile];
};
struct Codes {
  uint8_t v[4 * kColumnTile];
};

constexpr int kIntegerRows = 2, kIntegerTiles = 1, kVectorsAtOnce = 4, kFloatRows = 2, kFloatTiles = 1;
constexpr int kPrefetchBytes = 0;
constexpr int kPairBytes = 8;

template <int kBytes>
inline void prefetch(const uint8_t*) {}

template <class Vector, class Function>
inline Vector each(Function function) {
  Vector result;
  for (int i = 0; i < int(sizeof(result.v) / sizeof(result.v[0])); i++) result.v[i] = function(i);
  return result;
}

inline Floats broadcast(float x) {
  return each<Floats>([=](int) { return x; });
}
inline Ints broadcast(int32_t x) {
  return each<Ints>([=](int) { return x; });
}
inline Floats mul(const Floats& a, const Floats& b) {
  return each<Floats>([&](int i) { return a.v[i] * b.v[i]; });
}
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  return each<Floats>([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline Floats to_floats(const Ints& x) {
  return each<Floats>([&](int i) { return float(x.v[i]); });
}
inline Floats load_floats(const float* p) {
  return each<Floats>([=](int i) { return p[i]; });
}
inline Floats load_fp16(const uint8_t* p) {
  uint16_t halves[kColumnTile];
  std::memcpy(halves, p, sizeof(halves));
  return each<Floats>([&](int i) { return from_fp16(halves[i]); });
}
inline void store(float* p, const Floats& x, int count) {
  for (int i = 0; i < kColumnTile && i < count; i++) p[i] = x.v[i];
}

inline Codes load_codes(const uint8_t* p) {
  return each<Codes>([=](int i) { return p[i]; });
}
inline Codes low_nibbles(const Codes& x) {
  return each<Codes>([&](int i) { return uint8_t(x.v[i] & 15); });
}
inline Codes high_nibbles(const Codes& x) {
  return each<Codes>([&](int i) { return uint8_t(x.v[i] >> 4); });
}
// A table in each 16 bytes, in which alone interleaving takes place.
inline Codes load_table(const uint8_t* p) {
  return each<Codes>([=](int i) { return p[i % 16]; });
}
inline Codes look_up(const Codes& table, const Codes& codes) {
  return each<Codes>([&](int i) { return table.v[codes.v[i]]; });
}
inline Codes interleave_low(const Codes& a, const Codes& b) {
  return each<Codes>([&](int i) { return (i % 2 ? b : a).v[i / 16 * 16 + i % 16 / 2]; });
}
inline Codes interleave_high(const Codes& a, const Codes& b) {
  return each<Codes>([&](int i) { return (i % 2 ? b : a).v[i / 16 * 16 + 8 + i % 16 / 2]; });
}
template <int kShift, int kMask>
inline Codes or_bits(const Codes& codes, const Codes& plane) {
  return each<Codes>([&](int i) {
    const int shifted = kShift >= 0 ? plane.v[i] << (kShift & 7) : plane.v[i] >> (-kShift & 7);
    return uint8_t(codes.v[i] | (shifted & kMask));
  });
}

inline Codes shifted_right(const Codes& x, int bits) {
  return each<Codes>([&](int i) { return uint8_t(x.v[i] >> bits); });
}

template <int kZeroPoint>
inline Ints of_zero_point(int32_t minus_eight_sums) {
  return each<Ints>([=](int) { return minus_eight_sums * (kZeroPoint / 8); });
}
inline void add_dot(Ints& sum, const Codes& codes, const void* four, int unit) {
  const auto* q = static_cast<const int8_t*>(four);
  for (int i = 0; i < kColumnTile; i++)
    for (int j = 0; j < 4; j++) sum.v[i] += codes.v[4 * i + j] * q[j] * unit;
}
template <int kMaxCode, int kFirst, int kRows, int kTiles, int kVectors>
inline void add_dots(Ints (&sums)[kRows][kTiles], const Codes (&codes)[kTiles][kVectors],
                     const ActivationGroup* const (&group)[kRows]) {
  for (int r = 0; r < kRows; r++)
    for (int t = 0; t < kTiles; t++)
      for (int v = 0; v < kVectors; v++) add_dot(sums[r][t], codes[t][v], group[r]->q + 4 * (kFirst + v), 1);
}
template <int kMaxCode, int kRows, int kTiles>
inline void add_high_terms(Ints (&sums)[kRows][kTiles], const Codes (&codes)[kTiles], const uint8_t* high,
                           size_t row_bytes) {
  for (int r = 0; r < kRows; r++)
    for (int t = 0; t < kTiles; t++) add_dot(sums[r][t], codes[t], high + r * row_bytes, kHighUnit);
}
inline Floats dot_bf16(const Floats& sum, const Codes& w, const uint8_t* x) {
  uint16_t pairs[2 * kColumnTile];
  float pair[2];
  std::memcpy(pairs, w.v, sizeof(pairs));
  std::memcpy(pair, x, sizeof(pair));
  return each<Floats>([&](int i) {
    const float odd = std::fma(from_bf16(pairs[2 * i + 1]), pair[1], sum.v[i]);
    return std::fma(from_bf16(pairs[2 * i]), pair[0], odd);
  });
}

template <bool kIsSplit>
void quantize_group(const float* x, ActivationGroup& group, int8_t* high) {
  int32_t amax_bits = 0, sum_of_eighths = 0, q[kGroup], sums[2] = {0, 0};
  for (int v = 0; v < kGroup / 4; v++) {
    int32_t four_bits = 0;
    for (int i = 4 * v; i < 4 * v + 4; i++) {
      const int32_t magnitude = int32_t(float_bits(x[i]) & 0x7fffffff);
      if (magnitude > four_bits) four_bits = magnitude;
    }
    if (four_bits > amax_bits) amax_bits = four_bits;
    sum_of_eighths += four_bits >> 3;
  }
  const GroupScale scale = kIsSplit ? split_scale(amax_bits, sum_of_eighths) : group_scale(amax_bits);
  for (int i = 0; i < kGroup; i++) {
    q[i] = scale.inverse == 0 ? 0 : int32_t(std::lrint(x[i] * scale.inverse));
    sums[i / 16] += q[i];
  }
  set_sums(group, scale, sums[0], sums[1], kIsSplit ? split_outliers(q, high) : 0);
  for (int i = 0; i < kGroup; i++) group.q[i] = int8_t(q[i]);
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

}  // namespace engine::portable
