#include "linear/pack.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "linear/bf16_block.h"
#include "linear/packed_layout.h"
#include "runtime/rounding.h"

namespace engine {
namespace {

// A group of integer weights, between the source type and a tile: code * scale, plus an offset if the format has one.
struct WeightGroup {
  uint8_t codes[kGroup];
  uint16_t scales[2];
  uint16_t offset;
};

float load_fp16(const uint8_t* p) { return from_fp16(load_u16(p)); }
bool is_finite_fp16(const uint8_t* p) { return (load_u16(p) & 0x7c00) != 0x7c00; }

// The functions that unpack a group return whether all of its numbers are finite.

// Unpacks a block of 32 weights: an fp16 scale, in some types an fp16 offset, in some types fifth bits, and codes.
bool unpack_block(SourceType type, const uint8_t* block, WeightGroup& group) {
  const bool has_minimum = type == SourceType::q4_1 || type == SourceType::q5_1;
  const bool has_fifth_bits = type == SourceType::q5_0 || type == SourceType::q5_1;
  const bool is_finite = is_finite_fp16(block) && (!has_minimum || is_finite_fp16(block + 2));
  group.scales[0] = load_u16(block);
  block += 2;
  if (has_minimum) {
    group.offset = load_u16(block);
    block += 2;
  } else if (type == SourceType::q5_0) {
    group.offset = to_fp16(-16.0f * from_fp16(group.scales[0]));
  }
  if (type == SourceType::q8_0) {
    for (int i = 0; i < kGroup; i++) group.codes[i] = block[i] ^ 0x80;
    return is_finite;
  }
  uint32_t fifth_bits = 0;
  if (has_fifth_bits) {
    std::memcpy(&fifth_bits, block, 4);
    block += 4;
  }
  for (int i = 0; i < 16; i++) {
    group.codes[i] = uint8_t((block[i] & 15) | (fifth_bits >> i & 1) << 4);
    group.codes[i + 16] = uint8_t(block[i] >> 4 | (fifth_bits >> (i + 16) & 1) << 4);
  }
  return is_finite;
}

// Unpacks a block of mxfp4: an exponent, whose largest value means NaN, and 16 bytes of codes.
bool unpack_mxfp4_block(const uint8_t* block, WeightGroup& group) {
  group.scales[0] = block[0];
  for (int i = 0; i < 16; i++) {
    group.codes[i] = block[1 + i] & 15;
    group.codes[i + 16] = block[1 + i] >> 4;
  }
  return block[0] != 255;
}

// Unpacks half h (0 or 1) of a block of nvfp4: the scales of 16 elements each, whose sign is ignored and of which 127
// means 0, and 8 bytes of codes for each scale.
void unpack_nvfp4_group(const uint8_t* block, int h, WeightGroup& group) {
  for (int half = 0; half < 2; half++) {
    const uint8_t scale = block[2 * h + half];
    group.scales[half] = scale == 127 ? 0 : scale & 127;
    const uint8_t* nibbles = block + 4 + 8 * (2 * h + half);
    for (int i = 0; i < 8; i++) {
      group.codes[16 * half + i] = nibbles[i] & 15;
      group.codes[16 * half + i + 8] = nibbles[i] >> 4;
    }
  }
}

// Unpacks group g (of eight) of a q4_k or q5_k block: fp16 scales of the scales and of the minima, twelve bytes of
// six-bit scales and minima, 32 bytes of fifth bits (q5_k), 128 bytes of nibbles.
bool unpack_k_group(SourceType type, const uint8_t* block, int g, WeightGroup& group) {
  const uint8_t* packed = block + 4;
  int scale, minimum;
  if (g < 4) {
    scale = packed[g] & 63;
    minimum = packed[g + 4] & 63;
  } else {
    scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6) << 4;
    minimum = packed[g + 4] >> 4 | (packed[g] >> 6) << 4;
  }
  group.scales[0] = to_fp16(load_fp16(block) * float(scale));
  group.offset = to_fp16(-(load_fp16(block + 2) * float(minimum)));
  const uint8_t* fifth_bits = block + 16;
  const uint8_t* nibbles = block + (type == SourceType::q5_k ? 48 : 16) + 32 * (g / 2);
  for (int i = 0; i < kGroup; i++) {
    group.codes[i] = nibbles[i] >> (g % 2 * 4) & 15;
    if (type == SourceType::q5_k) group.codes[i] |= (fifth_bits[i] >> g & 1) << 4;
  }
  return is_finite_fp16(block) && is_finite_fp16(block + 2);
}

// Unpacks group g (of eight) of a q6_k block: 128 bytes of low nibbles, 64 bytes of the high two bits, 16 int8 scales
// of half groups, and their fp16 scale.
bool unpack_q6_k_group(const uint8_t* block, int g, WeightGroup& group) {
  const uint8_t* low = block + 64 * (g / 4) + 32 * (g % 2);
  const uint8_t* high = block + 128 + 32 * (g / 4);
  for (int i = 0; i < kGroup; i++)
    group.codes[i] = uint8_t((low[i] >> (g % 4 / 2 * 4) & 15) | (high[i] >> (g % 4 * 2) & 3) << 4);
  const float scale = load_fp16(block + 208);
  for (int half = 0; half < 2; half++) group.scales[half] = to_fp16(scale * float(int8_t(block[192 + 2 * g + half])));
  return is_finite_fp16(block + 208);
}

float element(SourceType type, const uint8_t* source, int i) {
  if (type == SourceType::bf16) return from_bf16(load_u16(source + 2 * i));
  if (type == SourceType::f16) return load_fp16(source + 2 * i);
  float x;
  std::memcpy(&x, source + 4 * i, 4);
  return x;
}

void quantize_to_u8(const float* x, WeightGroup& group) {
  float amax = 0;
  for (int i = 0; i < kGroup; i++) amax = std::fmax(amax, std::fabs(x[i]));
  group.scales[0] = to_fp16(amax / 127.0f);
  const float scale = from_fp16(group.scales[0]);
  for (int i = 0; i < kGroup; i++) {
    const long q = scale == 0 ? 0 : std::lrint(x[i] / scale);
    group.codes[i] = uint8_t(128 + (q > 127 ? 127 : q < -127 ? -127 : q));
  }
}

float squared_error_of_u4(const float* x, WeightGroup& group, float low, float high) {
  group.scales[0] = to_fp16((high - low) / 15.0f);
  group.offset = to_fp16(low);
  const float scale = from_fp16(group.scales[0]), offset = from_fp16(group.offset);
  float error = 0;
  for (int i = 0; i < kGroup; i++) {
    const long q = scale == 0 ? 0 : std::lrint((x[i] - offset) / scale);
    group.codes[i] = uint8_t(q > 15 ? 15 : q < 0 ? 0 : q);
    const float difference = x[i] - (group.codes[i] * scale + offset);
    error += difference * difference;
  }
  return error;
}

// Try several ranges that clip the extremes, and keep the one with the least squared error.
void quantize_to_u4(const float* x, WeightGroup& group) {
  float low = x[0], high = x[0];
  for (int i = 1; i < kGroup; i++) {
    low = std::fmin(low, x[i]);
    high = std::fmax(high, x[i]);
  }
  float best = -1;
  for (int step = 0; step < 8; step++) {
    const float shrink = 0.02f * float(step) * (high - low);
    WeightGroup candidate{};
    const float error = squared_error_of_u4(x, candidate, low + shrink, high - shrink);
    if (best < 0 || error < best) {
      best = error;
      group = candidate;
    }
  }
}

bool unpack_group(WeightFormat format, SourceType type, const uint8_t* row, int g, WeightGroup& group) {
  switch (type) {
    case SourceType::q4_0:
      return unpack_block(type, row + size_t(g) * 18, group);
    case SourceType::q4_1:
      return unpack_block(type, row + size_t(g) * 20, group);
    case SourceType::q5_0:
      return unpack_block(type, row + size_t(g) * 22, group);
    case SourceType::q5_1:
      return unpack_block(type, row + size_t(g) * 24, group);
    case SourceType::q8_0:
      return unpack_block(type, row + size_t(g) * 34, group);
    case SourceType::q4_k:
      return unpack_k_group(type, row + size_t(g / 8) * 144, g % 8, group);
    case SourceType::q5_k:
      return unpack_k_group(type, row + size_t(g / 8) * 176, g % 8, group);
    case SourceType::mxfp4:
      return unpack_mxfp4_block(row + size_t(g) * 17, group);
    case SourceType::nvfp4:
      unpack_nvfp4_group(row + size_t(g / 2) * 36, g % 2, group);
      return true;
    case SourceType::q6_k:
      return unpack_q6_k_group(row + size_t(g / 8) * 210, g % 8, group);
    case SourceType::f32:
    case SourceType::f16:
    case SourceType::bf16: {
      float x[kGroup];
      for (int i = 0; i < kGroup; i++) x[i] = element(type, row, g * kGroup + i);
      if (!std::all_of(x, x + kGroup, [](float each) { return std::isfinite(each); })) return false;
      if (format == WeightFormat::u8)
        quantize_to_u8(x, group);
      else
        quantize_to_u4(x, group);
      return true;
    }
    case SourceType::f8:
      return false;
  }
  return false;
}

void store_group(WeightFormat format, const WeightGroup& group, int column, int index, int groups, uint8_t* tile) {
  uint32_t vectors[8];  // four codes of each
  std::memcpy(vectors, group.codes, sizeof(vectors));
  uint8_t* const codes = tile + size_t(index) * code_bytes(format) + 4 * column;
  const auto store = [codes](int line, uint32_t bytes) { std::memcpy(codes + 64 * line, &bytes, sizeof(bytes)); };
  if (format == WeightFormat::u8) {
    for (int v = 0; v < 8; v++) store(v, vectors[v]);
  } else {
    for (int v = 0; v < 8; v += 2) store(v / 2, (vectors[v] & 0x0f0f0f0f) | (vectors[v + 1] & 0x0f0f0f0f) << 4);
    const int high_bits = format == WeightFormat::u5_offset ? 1 : format == WeightFormat::u6 ? 2 : 0;
    for (int first = 0, line = 4; first < 4 * high_bits; first += 8 / high_bits, line++) {
      uint32_t plane = 0;
      for (int i = 0; i < 8 / high_bits; i++) plane |= (vectors[first + i] >> 4 & 0x03030303) << i * high_bits;
      store(line, plane);
    }
  }
  uint8_t* scales = tile + scales_at(format, groups) + index * scale_bytes(format);
  for (int i = 0; i < scales_of_group(format); i++, scales += bytes_of_scales(format)) {
    if (is_minifloat(format))
      scales[column] = uint8_t(group.scales[i]);
    else
      std::memcpy(scales + 2 * column, &group.scales[i], 2);
  }
  if (has_offset(format)) {
    const float centre = float(zero_point(format)) * from_fp16(group.scales[0]);
    const uint16_t offset = to_bf16(from_fp16(group.offset) + centre);
    std::memcpy(tile + offsets_at(format, groups) + index / 2 * kOffsetBytes + 4 * column + index % 2 * 2, &offset, 2);
  }
}

// Returns whether the format can represent all numbers. f16 cannot represent an infinity, which would become the
// largest finite number.
bool pack_float_row(WeightFormat format, SourceType type, const uint8_t* source, int k, uint8_t* out) {
  bool has_all = true;
  for (int i = 0; i < k; i++, out += float_stride(format)) {
    const float x = element(type, source, i);
    if (format == WeightFormat::f32) {
      std::memcpy(out, &x, 4);
    } else {
      has_all &= std::isfinite(x);
      const uint16_t half = to_fp16(x);
      std::memcpy(out, &half, 2);
    }
  }
  return has_all;
}

void pack_bf16_tiles_row(const PackedWeight& w, SourceType type, const uint8_t* source, int row) {
  uint8_t* const out = w.data + tile_at(w, row / kColumnTile) + row % kColumnTile * 4;
  for (int i = 0; i < w.k; i++) {
    const uint16_t bits = without_subnormals(to_bf16(element(type, source, i)));
    std::memcpy(out + i / 2 * kBF16PairBytes + i % 2 * 2, &bits, sizeof(bits));
  }
}

// Returns whether all numbers are finite.
bool pack_f8_row(const PackedWeight& w, const uint8_t* source, int row) {
  const int tile = row / kColumnTile, column = row % kColumnTile;
  uint8_t* const out = w.data + tile_at(w, tile) + 2 * column;
  bool are_finite = true;
  for (int i = 0; i < w.k; i++) {
    out[i / 2 * kFloat8PairStride + i % 2] = source[i];
    are_finite &= (source[i] & 127) != 127;
  }
  uint8_t* scales = w.data + float_scales_at(w, tile) + sizeof(float) * column;
  for (int i = 0; i < w.k; i += w.group, scales += kFloatScaleStride) {
    float scale;
    std::memcpy(&scale, source + w.k + i / w.group * sizeof(float), sizeof(float));
    are_finite &= std::isfinite(scale);
    std::memcpy(scales, &scale, sizeof(float));
  }
  return are_finite;
}

void pack_bf16_rows(const PackedWeight& w, SourceType type, const uint8_t* source, ptrdiff_t source_row_bytes,
                    int first_row, int rows) {
  static_assert(kRowsTogether == kBF16BlockColumns, "a block is packed as a whole");
  std::vector<uint16_t> rounded;
  for (int row = 0; row < rows; row += kRowsTogether, source += kRowsTogether * source_row_bytes) {
    const int columns = std::min(rows - row, kRowsTogether), index = (first_row + row) / kRowsTogether;
    if (type == SourceType::bf16) {
      pack_bf16_block(w, index, source, source_row_bytes, columns);
      continue;
    }
    rounded.clear();
    for (int column = 0; column < columns; column++)
      for (int i = 0; i < w.k; i++) rounded.push_back(to_bf16(element(type, source + column * source_row_bytes, i)));
    pack_bf16_block(w, index, reinterpret_cast<const uint8_t*>(rounded.data()), ptrdiff_t(2) * w.k, columns);
  }
}

}  // namespace

bool can_pack(SourceType type, WeightFormat format) {
  switch (type) {
    case SourceType::f32:
    case SourceType::f16:
    case SourceType::bf16:
      if (format == WeightFormat::f8) return false;
      return !is_integer(format) || format == WeightFormat::u4_offset || format == WeightFormat::u8;
    case SourceType::q4_0:
      return format == WeightFormat::u4;
    case SourceType::q4_1:
    case SourceType::q4_k:
      return format == WeightFormat::u4_offset;
    case SourceType::q5_0:
    case SourceType::q5_1:
    case SourceType::q5_k:
      return format == WeightFormat::u5_offset;
    case SourceType::q6_k:
      return format == WeightFormat::u6;
    case SourceType::q8_0:
      return format == WeightFormat::u8;
    case SourceType::mxfp4:
      return format == WeightFormat::mxfp4;
    case SourceType::nvfp4:
      return format == WeightFormat::nvfp4;
    case SourceType::f8:
      return format == WeightFormat::f8;
  }
  return false;
}

size_t packed_bytes(WeightFormat format, int n, int k, int group) {
  if (format == WeightFormat::bf16) return bf16_table_bytes(n) + bf16_blocks(n) * bf16_block_capacity(k);
  const int unit = is_integer(format) || format == WeightFormat::bf16_tiles ? 1 : kFloatBlockTiles;
  const int tiles = (n + kColumnTile - 1) / kColumnTile;
  return tile_at(format, k, group, (tiles + unit - 1) / unit * unit);
}

bool pack_rows(const PackedWeight& w, SourceType type, const uint8_t* source, ptrdiff_t source_row_bytes, int first_row,
               int rows) {
  if (w.format == WeightFormat::bf16) {
    pack_bf16_rows(w, type, source, source_row_bytes, first_row, rows);
    return true;
  }
  for (int row = first_row; row < first_row + rows; row++, source += source_row_bytes) {
    if (w.format == WeightFormat::f8) {
      if (!pack_f8_row(w, source, row)) return false;
      continue;
    }
    if (w.format == WeightFormat::bf16_tiles) {
      pack_bf16_tiles_row(w, type, source, row);
      continue;
    }
    uint8_t* tile = w.data + tile_at(w, row / kColumnTile);
    const int column = row % kColumnTile;
    if (!is_integer(w.format)) {
      if (!pack_float_row(w.format, type, source, w.k, tile + column * element_bytes(w.format))) return false;
      continue;
    }
    const int groups = w.k / kGroup;
    for (int g = 0; g < groups; g++) {
      WeightGroup group{};
      if (!unpack_group(w.format, type, source, g, group)) return false;
      store_group(w.format, group, column, g, groups, tile);
    }
  }
  return true;
}

size_t finish_packing(const PackedWeight& w) {
  return w.format == WeightFormat::bf16 ? join_bf16_blocks(w) : packed_bytes(w.format, w.n, w.k, w.group);
}

}  // namespace engine
