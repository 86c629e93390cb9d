// Computes the scales and sums of groups of int8 activations, with the same results for every instruction set.
#pragma once

#include "linear/packed_layout.h"
#include "runtime/rounding.h"

namespace engine {
namespace {

// A group of int8_split gets second terms if its largest magnitude is more than kOutlierRatio times the typical largest
// magnitude of four consecutive elements. Then kOrdinaryRatio times the typical one fits in int8.
constexpr float kOutlierRatio = 8, kOrdinaryRatio = 2.5f;
// Turns a sum over seven numbers, of one eighth of the bits of each, into the mean of their bits.
constexpr float kMeanOfSeven = 8.0f / 7.0f;

// Returns the scale of a group of int8_split. A group consists of eight fours, that is, runs of four elements.
// `sum_of_eighths` is the sum, over these, of an eighth of the bits of the largest magnitude. The bits of a float are
// close to its logarithm. So the mean of the bits of all fours but the largest is typical of the group, whatever
// outliers it has.
inline GroupScale split_scale(int32_t amax_bits, int32_t sum_of_eighths) {
  const GroupScale plain = group_scale(amax_bits);
  if (plain.inverse == 0) return plain;
  const float typical_bits = float(sum_of_eighths - (amax_bits >> 3)) * kMeanOfSeven;
  const float typical = from_bits(uint32_t(std::lrint(typical_bits)));
  if (!(from_bits(uint32_t(amax_bits)) > typical * kOutlierRatio)) return plain;
  // With a smaller scale, two terms could not represent the largest magnitude.
  const float least = plain.scale * (1.0f / kHighUnit);
  const float scale = typical * (kOrdinaryRatio / 127.0f);
  return scale > least ? GroupScale{scale, 1.0f / scale} : GroupScale{least, 1.0f / least};
}

// Splits the elements of fours in which a number does not fit in int8 into q and second terms. Returns the mask of
// these fours.
inline uint8_t split_outliers(int32_t (&q)[kGroup], int8_t* high) {
  uint8_t fours = 0;
  for (int v = 0; v < kGroup / 4; v++) {
    bool is_outlier = false;
    for (int i = 4 * v; i < 4 * v + 4; i++) is_outlier |= q[i] > 127 || q[i] < -127;
    fours |= is_outlier << v;
    for (int i = 4 * v; i < 4 * v + 4; i++) {
      const int32_t above = is_outlier ? (q[i] + kHighUnit / 2) >> kHighShift : 0;
      high[i] = int8_t(above);
      q[i] -= above * kHighUnit;
    }
  }
  return fours;
}

// Sets the fields of a group other than q. `first` and `second` are the sums over its halves, including second terms.
inline void set_sums(ActivationGroup& group, const GroupScale& scale, int32_t first, int32_t second, unsigned fours) {
  const bool is_zero = scale.scale == 0;
  group.scale = is_zero ? 1.0f : scale.scale;
  group.inverse = is_zero ? 1.0f : 1.0f / scale.scale;
  group.scaled_sum = to_bf16(group.scale * float(first + second));
  group.minus_eight_sums = -8 * (first + second);
  group.minus_eight_sums_of_halves[0] = -8 * first;
  group.minus_eight_sums_of_halves[1] = -8 * second;
  group.fours = fours;
  group.padding = 0;
}

}  // namespace
}  // namespace engine
