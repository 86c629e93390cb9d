// Matrix products of float activations with packed weights: out[r][n] = sum over k of x[r][k] * w[n][k].
//
// An output element depends on its own row of x and its own row of w alone: its sum runs over k in
// ascending order, in the same order and roundings for every number of rows, range of columns and
// instruction set, but that amx has roundings of its own for bf16. Nothing here allocates, locks or keeps
// state; call it from any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/readahead.h"

namespace engine {

// How the weights of a matrix are stored. `code`, `scale` and `offset` are of a group of 32 (u6: 16) elements along k;
// the scale is fp16, the offset bf16.
enum class WeightFormat : int32_t {
  u4 = 0,         // (code - 8) * scale             Q4_0
  u4_offset = 1,  // (code - 8) * scale + offset    Q4_1, Q4_K
  u5_offset = 2,  // (code - 16) * scale + offset   Q5_0, Q5_1, Q5_K
  u6 = 3,         // (code - 32) * scale            Q6_K
  u8 = 4,         // (code - 128) * scale           Q8_0
  bf16 = 5,
  f16 = 6,
  f32 = 7,
};
constexpr int kNumWeightFormats = 8;

// How a row of activations is stored for the product with weights of a format.
enum class ActivationKind : int32_t {
  int8 = 0,  // for the integer formats: int8 and a float32 scale per group of 32
  bf16 = 1,  // for bf16
  f32 = 2,   // for f16 and f32
  // For the integer formats: int8, with a second int8 for outliers that would leave the rest of their group
  // few levels.
  int8_split = 3,
};

// A matrix [n, k]. `data` is what pack_rows fills, aligned to 64 bytes; not owned.
struct PackedWeight {
  WeightFormat format;
  int32_t n, k;
  uint8_t* data;
};

// Columns [n_begin, n_end) of the output are computed from whole tiles of packed rows: n_begin must be
// a multiple of this, n_end one or n itself. Multiples of 4 * kColumnTile are fastest.
constexpr int kColumnTile = 16;

// Bytes of one row of k activations: row r of a buffer begins at r * activation_row_bytes(kind, k).
// Always a multiple of 16; buffers are aligned to 64.
size_t activation_row_bytes(ActivationKind kind, int k);

// Where column `column` of a row of activations is, if whole groups, or pairs of bf16, are before it. Not for
// int8_split.
size_t activation_offset(ActivationKind kind, int column);

// Convert rows of x, x_stride floats apart, into rows of `out`. Integer formats need k % 32 == 0.
// A row with a NaN or an infinity gives NaN in the groups it is in, hence in all outputs of the row.
void quantize_rows(ActivationKind kind, const float* x, ptrdiff_t x_stride, int rows, int k, void* out);

// out[r * out_stride + (n - n_begin)] for r in [0, rows) and n in [n_begin, n_end); `x` is from
// quantize_rows with a kind for the weight's format. Any number of rows: weights are read from
// memory once per 64 rows or more. `readahead` makes a step for about kReadaheadWeights weights times
// kReadaheadRows rows, or fewer.
void linear_rows(const PackedWeight& w, ActivationKind kind, const void* x, int rows, int n_begin,
                 int n_end, float* out, ptrdiff_t out_stride, Readahead& readahead);

// Rows for which weights are unpacked once: products of more do it again.
int rows_at_once(WeightFormat format);

constexpr int kReadaheadWeights = 1024, kReadaheadRows = 6;

// The k elements of rows of the matrix, as float32 (for embeddings).
void unpack_weight_row(const PackedWeight& w, int row, float* out);

}  // namespace engine
