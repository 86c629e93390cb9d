#include "linear/linear.h"

#include <cmath>

#include "linear/bf16_block.h"
#include "isa/isa.h"
#include "linear/kernels.h"
#include "runtime/rounding.h"

namespace engine {

namespace {

const LinearKernels& linear_kernels() { return *kernels().linear; }

// E4M3 numbers without their signs, read as fp16, are 2^-8 of their values.
float from_float8(uint8_t code) { return from_fp16(uint16_t((code & 128) << 8 | (code & 127) << 7)) * kFloat8Unit; }

// Returns the factor of a column: the value of one unit of its codes, in matrices of integers.
float scale_of(const PackedWeight& w, const uint8_t* scales, int column) {
  if (w.format == WeightFormat::mxfp4) return std::ldexp(1.0f, scales[column] - 128);
  if (w.format == WeightFormat::nvfp4) return from_float8(scales[column]) * (0.5f * w.scale);
  return from_fp16(load_u16(scales + 2 * column));
}

void unpack_float_row(const PackedWeight& w, const uint8_t* tile, int row, float* out) {
  const uint8_t* weight = tile + row % kColumnTile * element_bytes(w.format);
  for (int k = 0; k < w.k; k++, weight += float_stride(w.format)) {
    if (w.format == WeightFormat::f32)
      std::memcpy(out + k, weight, 4);
    else
      out[k] = from_fp16(load_u16(weight));
  }
}

void unpack_bf16_tiles_row(const PackedWeight& w, const uint8_t* tile, int row, float* out) {
  const uint8_t* pair = tile + row % kColumnTile * 4;
  for (int k = 0; k < w.k; k++) out[k] = from_bf16(load_u16(pair + k / 2 * kBF16PairBytes + k % 2 * 2));
}

void unpack_float8_row(const PackedWeight& w, const uint8_t* tile, int row, float* out) {
  const uint8_t* codes = tile + row % kColumnTile * 2;
  const uint8_t* scales = w.data + float_scales_at(w, row / kColumnTile) + row % kColumnTile * sizeof(float);
  for (int k = 0; k < w.k; k++) {
    float scale;
    std::memcpy(&scale, scales + k / w.group * kFloatScaleStride, sizeof(float));
    out[k] = from_float8(codes[k / 2 * kFloat8PairStride + k % 2]) * scale;
  }
}

}  // namespace

size_t activation_offset(ActivationKind kind, int column) {
  if (kind == ActivationKind::bf16) return size_t(column) / 2 * linear_kernels().pair_bytes;
  return kind == ActivationKind::int8 ? high_terms_at(column / kGroup) : size_t(column) * 4;
}

size_t activation_row_bytes(ActivationKind kind, int k) {
  const size_t bytes =
      kind == ActivationKind::int8_split ? high_terms_at(k / kGroup) + size_t(k) : activation_offset(kind, k + k % 2);
  return (bytes + 15) / 16 * 16;
}

void quantize_rows(ActivationKind kind, const float* x, ptrdiff_t x_stride, int rows, int k, void* out) {
  const size_t row_bytes = activation_row_bytes(kind, k);
  auto* row = static_cast<uint8_t*>(out);
  for (int r = 0; r < rows; r++, x += x_stride, row += row_bytes) {
    if (kind == ActivationKind::int8)
      linear_kernels().quantize_int8(x, k, row);
    else if (kind == ActivationKind::int8_split)
      linear_kernels().quantize_int8_split(x, k, row);
    else if (kind == ActivationKind::bf16)
      linear_kernels().quantize_bf16(x, k, row);
    else if (kind == ActivationKind::f32)
      std::memcpy(row, x, size_t(k) * sizeof(float));
  }
}

void linear_rows(const PackedWeight& w, ActivationKind kind, const void* x, int rows, int n_begin, int n_end,
                 float* out, ptrdiff_t out_stride, Readahead& readahead) {
  linear_kernels().of_format[int(w.format)].linear(w, kind, static_cast<const uint8_t*>(x), rows, n_begin, n_end, out,
                                                   out_stride, readahead);
}

int rows_at_once(WeightFormat format) { return linear_kernels().of_format[int(format)].rows_at_once; }

void unpack_weight_row(const PackedWeight& w, int row, float* out) {
  if (w.format == WeightFormat::bf16) return unpack_bf16_row(w, row, out);
  const int column = row % kColumnTile;
  const uint8_t* tile = w.data + tile_at(w, row / kColumnTile);
  if (w.format == WeightFormat::f8) return unpack_float8_row(w, tile, row, out);
  if (w.format == WeightFormat::bf16_tiles) return unpack_bf16_tiles_row(w, tile, row, out);
  if (!is_integer(w.format)) return unpack_float_row(w, tile, row, out);
  const int groups = w.k / kGroup;
  const uint8_t* scales = tile + scales_at(w.format, groups);
  const uint8_t* offsets = tile + offsets_at(w.format, groups) + 4 * column;
  for (int g = 0; g < groups; g++, tile += code_bytes(w.format), scales += scale_bytes(w.format)) {
    for (int k = 0; k < kGroup; k++) {
      const int vector = k / 4, byte = 4 * column + k % 4;
      int code;
      if (w.format == WeightFormat::u8) {
        code = tile[64 * vector + byte];
      } else {
        code = tile[64 * (vector / 2) + byte] >> (vector % 2 * 4) & 15;
        if (w.format == WeightFormat::u5_offset) code |= (tile[256 + byte] >> vector & 1) << 4;
        if (w.format == WeightFormat::u6) code |= (tile[256 + 64 * (vector / 4) + byte] >> (vector % 4 * 2) & 3) << 4;
        if (is_minifloat(w.format)) code = kMinifloats[code];
      }
      const uint8_t* of_half = scales + k * scales_of_group(w.format) / kGroup * bytes_of_scales(w.format);
      const float x = float(code - zero_point(w.format)) * scale_of(w, of_half, column);
      const uint8_t* offset = offsets + g / 2 * kOffsetBytes + g % 2 * 2;
      out[g * kGroup + k] = has_offset(w.format) ? x + from_bf16(load_u16(offset)) : x;
    }
  }
}

}  // namespace engine
