// The memory layout that packing, quantization and the kernels of every instruction set share.
//
// A packed matrix is a sequence of column tiles. A tile is kColumnTile consecutive rows of the matrix, which are
// columns of the output. They are interleaved so that one vector holds one element, or four codes, of each. A tile of
// integer weights consists of, for each of its groups of 32 along k,
//   codes    eight vectors v of 16 columns x 4 codes (k = 4 v .. 4 v + 3), as
//            u8: eight times 64 bytes; others: four times 64 bytes, the low four bits of vector 2 i
//            in the low nibbles, those of vector 2 i + 1 in the high nibbles
//   planes   u5: 64 bytes, bit v of each byte is bit 4 of vector v's code
//            u6: 2 x 64 bytes, bits 2 (v % 4) and + 1 of plane v / 4 are bits 4 and 5
// then for each group
//   scales   16 fp16, or bytes in mxfp4 (u6 and nvfp4: 16 for the first half of the group, 16 for the second)
// then, where the format has them, for each pair of groups
//   offsets  16 pairs of bf16: the format's offset plus zero point * scale, because products are of code - zero_point
// Float weights are in blocks of four tiles, f32 [k][64], f16 [k][64] or f8 [k / 2][64][2]. Behind a block of f8 are
// the scales of its groups, float32 [groups][64]. A kernel needs four sums at a time to keep the multipliers busy, and
// so it still reads a single stream. bf16 has its own layout: bf16_block.h. A tile of bf16_tiles is [k / 2][16][2].
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/linear.h"

namespace engine {

constexpr int kGroup = 32;

// A group of int8 activations, each equal to q * scale. The other fields are sums over q, and multiples of them. They
// are computed once here, so that kernels apply scales, zero points and offsets with few operations.
struct ActivationGroup {
  int8_t q[kGroup];
  float scale;          // 1 where all q are 0
  float inverse;        // 1 / scale
  uint32_t scaled_sum;  // scale * sum, in bf16
  int32_t minus_eight_sums;
  int32_t minus_eight_sums_of_halves[2];
  uint32_t fours;  // a bit for each four consecutive q, set if they have second terms
  uint32_t padding;
};
static_assert(sizeof(ActivationGroup) == 64, "rows of activations consist of these");

// A row of int8_split is a row of int8, followed by a second term for each element, the int8 `high`. An activation is
// (high * kHighUnit + q) * scale, and the group's sums include second terms. Of the four activations that a dot product
// reads at a time, either all or none have second terms. The terms that do not exist are stored as zeros, so adding
// them changes nothing.
constexpr int kHighShift = 4, kHighUnit = 1 << kHighShift;

constexpr size_t high_terms_at(int groups) { return size_t(groups) * sizeof(ActivationGroup); }

constexpr bool is_integer(WeightFormat format) { return format <= WeightFormat::u8; }

// A minifloat is stored as an integer, which is twice its value plus the zero point.
constexpr bool is_minifloat(WeightFormat format) {
  return format == WeightFormat::mxfp4 || format == WeightFormat::nvfp4;
}
constexpr uint8_t kMinifloats[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

constexpr bool has_offset(WeightFormat format) {
  return format == WeightFormat::u4_offset || format == WeightFormat::u5_offset;
}

// The code that means zero. Products use code - zero_point.
constexpr int zero_point(WeightFormat format) {
  return format == WeightFormat::u8                                  ? 128
         : format == WeightFormat::u6                                ? 32
         : format == WeightFormat::u5_offset || is_minifloat(format) ? 16
                                                                     : 8;
}

// The size in bytes of a group in a tile.
constexpr int code_bytes(WeightFormat format) {
  return format == WeightFormat::u8          ? 512
         : format == WeightFormat::u6        ? 384
         : format == WeightFormat::u5_offset ? 320
                                             : 256;
}
// The number of groups of scales in a group of codes, and the size in bytes of one.
constexpr int scales_of_group(WeightFormat format) {
  return format == WeightFormat::u6 || format == WeightFormat::nvfp4 ? 2 : 1;
}
constexpr int bytes_of_scales(WeightFormat format) { return kColumnTile * (is_minifloat(format) ? 1 : 2); }
constexpr int scale_bytes(WeightFormat format) { return scales_of_group(format) * bytes_of_scales(format); }
// The size in bytes of the offsets of a pair of groups.
constexpr int kOffsetBytes = 4 * kColumnTile;

// The offsets in bytes at which the parts of a tile begin.
constexpr size_t scales_at(WeightFormat format, int groups) { return size_t(groups) * code_bytes(format); }
constexpr size_t offsets_at(WeightFormat format, int groups) {
  return scales_at(format, groups) + (size_t(groups) * scale_bytes(format) + 63) / 64 * 64;
}
constexpr size_t tile_bytes(WeightFormat format, int groups) {
  return offsets_at(format, groups) + (has_offset(format) ? size_t(groups + 1) / 2 * kOffsetBytes : 0);
}

constexpr int kFloatBlockTiles = 4;

constexpr int element_bytes(WeightFormat format) { return format == WeightFormat::f16 ? 2 : 4; }

// The bytes from an element of a tile of f16 or f32 to the next one along k.
constexpr int float_stride(WeightFormat format) { return element_bytes(format) * kColumnTile * kFloatBlockTiles; }

// The factor by which E4M3 numbers, read as fp16, must be multiplied to get their values.
constexpr float kFloat8Unit = 256;
// The number to add to the exponent and fraction of an E4M3 number to get those of the bf16 number. The eight numbers
// for which this does not work are in tables: as words, and as their low bytes followed by their high bytes.
constexpr int16_t kFloat8Bias = 120 << 7;
constexpr uint16_t kSmallestFloat8[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
constexpr uint8_t kSmallestFloat8Bytes[16] = {0, 0,    0x80, 0xc0, 0,    0x20, 0x40, 0x60,
                                              0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c};
// The bytes from a pair of f8 along k to the next one, and the size of the pairs of a tile.
constexpr int kFloat8PairStride = 2 * kColumnTile * kFloatBlockTiles, kFloat8PairBytes = 2 * kColumnTile;
constexpr size_t float8_block_bytes(int k) { return size_t(k + 1) / 2 * kFloat8PairStride; }
// The bytes from the scales of a group of f8 to the next ones.
constexpr size_t kFloatScaleStride = sizeof(float) * kColumnTile * kFloatBlockTiles;

// The bytes from a pair of bf16_tiles along k to the next one.
constexpr int kBF16PairBytes = 4 * kColumnTile;

// Returns the offset in bytes at which a tile of weights begins, in any format but bf16.
constexpr size_t tile_at(WeightFormat format, int k, int group, int tile) {
  if (is_integer(format)) return tile * tile_bytes(format, k / kGroup);
  if (format == WeightFormat::bf16_tiles) return size_t(tile) * ((k + 1) / 2) * kBF16PairBytes;
  if (format == WeightFormat::f8) {
    const size_t block_bytes = float8_block_bytes(k) + size_t(k + group - 1) / group * kFloatScaleStride;
    return tile / kFloatBlockTiles * block_bytes + size_t(tile % kFloatBlockTiles) * kFloat8PairBytes;
  }
  return tile / kFloatBlockTiles * size_t(k) * float_stride(format) +
         size_t(tile % kFloatBlockTiles) * element_bytes(format) * kColumnTile;
}
inline size_t tile_at(const PackedWeight& w, int tile) { return tile_at(w.format, w.k, w.group, tile); }
// Returns the offset in bytes at which the scales of a tile of f8 begin.
inline size_t float_scales_at(const PackedWeight& w, int tile) {
  return tile_at(w, tile / kFloatBlockTiles * kFloatBlockTiles) + float8_block_bytes(w.k) +
         tile % kFloatBlockTiles * sizeof(float) * kColumnTile;
}

}  // namespace engine
