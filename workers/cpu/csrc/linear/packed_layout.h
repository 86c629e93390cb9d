// The memory layout that packing, quantisation and the kernels of every instruction set share.
//
// A packed matrix is a sequence of column tiles: kColumnTile consecutive rows of it, which are
// columns of the output, interleaved so that one vector holds one element, or four codes, of each.
// A tile of integer weights is, for each of its groups of 32 along k,
//   codes    eight vectors v of 16 columns x 4 codes (k = 4 v .. 4 v + 3), as
//            u8: eight times 64 bytes; others: four times 64 bytes, the low four bits of vector 2 i
//            in the low nibbles, those of vector 2 i + 1 in the high nibbles
//   planes   u5: 64 bytes, bit v of each byte is bit 4 of vector v's code
//            u6: 2 x 64 bytes, bits 2 (v % 4) and + 1 of plane v / 4 are bits 4 and 5
// then for each group
//   scales   16 fp16 (u6: 16 for the first half of the group, 16 for the second)
// then, where the format has them, for each pair of groups
//   offsets  16 pairs of bf16: what the zero point times the scale leaves of the format's offset
// Float weights are in blocks of four tiles, f32 [k][64] or f16 [k][64], so that a kernel which needs four
// sums at once to keep the multipliers busy still reads one stream. bf16 has a layout of its own: bf16_block.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/linear.h"

namespace engine {

constexpr int kGroup = 32;

// A group of int8 activations, each q * scale. Also what turns scales, zero points and offsets into few operations:
// the sums are of q.
struct ActivationGroup {
  int8_t q[kGroup];
  float scale;    // 1 where all q are 0
  float inverse;  // of the scale
  uint32_t scaled_sum;  // in bf16
  int32_t minus_eight_sums;
  int32_t minus_eight_sums_of_halves[2];
  uint32_t fours;  // with second terms: a bit for each
  uint32_t padding;
};
static_assert(sizeof(ActivationGroup) == 64, "rows are multiples of these");

// A row of int8_split is one of int8, then an int8 `high` for each element: an activation is
// (high * kHighUnit + q) * scale, and the sums are of these. Four activations that a product takes at once have second
// terms together; other fours have `high` of zero: adding them changes nothing.
constexpr int kHighShift = 4, kHighUnit = 1 << kHighShift;

constexpr size_t high_terms_at(int groups) { return size_t(groups) * sizeof(ActivationGroup); }

constexpr bool is_integer(WeightFormat format) { return format <= WeightFormat::u8; }

constexpr bool has_offset(WeightFormat format) {
  return format == WeightFormat::u4_offset || format == WeightFormat::u5_offset;
}

// A code is centred by it: products are of code - zero_point.
constexpr int zero_point(WeightFormat format) {
  return format == WeightFormat::u8          ? 128
         : format == WeightFormat::u6        ? 32
         : format == WeightFormat::u5_offset ? 16
                                             : 8;
}

// Of a group in a tile.
constexpr int code_bytes(WeightFormat format) {
  return format == WeightFormat::u8          ? 512
         : format == WeightFormat::u6        ? 384
         : format == WeightFormat::u5_offset ? 320
                                             : 256;
}
constexpr int scale_bytes(WeightFormat format) { return 2 * kColumnTile * (format == WeightFormat::u6 ? 2 : 1); }
// Of a pair of groups.
constexpr int kOffsetBytes = 4 * kColumnTile;

// What is in a tile, from its beginning.
constexpr size_t scales_at(WeightFormat format, int groups) { return size_t(groups) * code_bytes(format); }
constexpr size_t offsets_at(WeightFormat format, int groups) {
  return scales_at(format, groups) + (size_t(groups) * scale_bytes(format) + 63) / 64 * 64;
}
constexpr size_t tile_bytes(WeightFormat format, int groups) {
  return offsets_at(format, groups) + (has_offset(format) ? size_t(groups + 1) / 2 * kOffsetBytes : 0);
}

constexpr int kFloatBlockTiles = 4;

constexpr int element_bytes(WeightFormat format) { return format == WeightFormat::f16 ? 2 : 4; }

// From a float tile's elements to its next ones along k.
constexpr int float_stride(WeightFormat format) {
  return element_bytes(format) * kColumnTile * kFloatBlockTiles;
}

// Where a tile of integer, f16 or f32 weights begins.
constexpr size_t tile_at(WeightFormat format, int k, int tile) {
  if (is_integer(format)) return tile * tile_bytes(format, k / kGroup);
  return size_t(tile / kFloatBlockTiles) * k * float_stride(format) +
         size_t(tile % kFloatBlockTiles) * element_bytes(format) * kColumnTile;
}

}  // namespace engine
