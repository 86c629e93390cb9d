// The memory layout that packing, quantisation and the kernels of every instruction set share.
//
// A packed matrix is a sequence of column tiles: kColumnTile consecutive rows of it, which are
// columns of the output, interleaved so that one vector holds one element, or four codes, of each.
// A tile of integer weights is a sequence of records, one per group of 32 along k:
//   codes    eight vectors v of 16 columns x 4 codes (k = 4 v .. 4 v + 3), as
//            u8: eight times 64 bytes; others: four times 64 bytes, the low four bits of vector 2 i
//            in the low nibbles, those of vector 2 i + 1 in the high nibbles
//   planes   u5: 64 bytes, bit v of each byte is bit 4 of vector v's code
//            u6: 2 x 64 bytes, bits 2 (v % 4) and + 1 of plane v / 4 are bits 4 and 5
//   scales   16 fp16 (u6: 16 for the first half of the group, 16 for the second)
//   offsets  16 fp16, where the format has them
// Float weights are in blocks of four tiles, f32 [k][64] or f16 [k][64], so that a kernel which needs four
// sums at once to keep the multipliers busy still reads one stream. bf16 has a layout of its own: bf16_block.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.h"

namespace engine {

constexpr int kGroup = 32;

// A group of int8 activations. Also the sums that turn zero points and offsets into one operation.
struct ActivationGroup {
  int8_t q[kGroup];
  float scale;
  float scaled_sum;  // scale * sum of q
  int32_t minus_sum;
  int32_t minus_first_sum;  // of the first half of q
};
static_assert(sizeof(ActivationGroup) == 48, "rows are 16-byte multiples of these");

// A row of int8_split is one of int8, then for each group a mask of its fours (what a product takes at once)
// that have second terms, then an int8 `high` for each element: an activation is (high * kHighUnit + q) * scale,
// and the sums are of these. Other fours have `high` of zero: adding them changes nothing.
constexpr int kHighShift = 6, kHighUnit = 1 << kHighShift;
// Masks are padded to a multiple of this.
constexpr int kMaskGroups = 64;

constexpr size_t masks_at(int groups) { return size_t(groups) * sizeof(ActivationGroup); }

constexpr size_t high_terms_at(int groups) {
  return masks_at(groups) + size_t(groups + kMaskGroups - 1) / kMaskGroups * kMaskGroups;
}

// Where the parts of a row of int8_split are.
struct SplitRow {
  ActivationGroup* groups;
  uint8_t* fours;
  int8_t* high;

  SplitRow(void* row, int k)
      : groups(static_cast<ActivationGroup*>(row)),
        fours(static_cast<uint8_t*>(row) + masks_at(k / kGroup)),
        high(static_cast<int8_t*>(row) + high_terms_at(k / kGroup)) {}
};

constexpr bool is_integer(WeightFormat format) { return format <= WeightFormat::u8; }

constexpr bool has_offset(WeightFormat format) {
  return format == WeightFormat::u4_offset || format == WeightFormat::u5_offset;
}

// Bytes of a record before its scales.
constexpr int code_bytes(WeightFormat format) {
  return format == WeightFormat::u8          ? 512
         : format == WeightFormat::u6        ? 384
         : format == WeightFormat::u5_offset ? 320
                                             : 256;
}

constexpr int record_bytes(WeightFormat format) {
  const bool two_fp16 = has_offset(format) || format == WeightFormat::u6;
  return code_bytes(format) + 2 * kColumnTile * (two_fp16 ? 2 : 1);
}

constexpr int kFloatBlockTiles = 4;

constexpr int element_bytes(WeightFormat format) { return format == WeightFormat::f16 ? 2 : 4; }

// From a float tile's elements to its next ones along k.
constexpr int float_stride(WeightFormat format) {
  return element_bytes(format) * kColumnTile * kFloatBlockTiles;
}

// Where a tile of integer, f16 or f32 weights begins.
constexpr size_t tile_at(WeightFormat format, int k, int tile) {
  if (is_integer(format)) return size_t(tile) * (k / kGroup) * record_bytes(format);
  return size_t(tile / kFloatBlockTiles) * k * float_stride(format) +
         size_t(tile % kFloatBlockTiles) * element_bytes(format) * kColumnTile;
}

}  // namespace engine
