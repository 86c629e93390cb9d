// Matrix products of float activations and packed weights: out[r][n] = sum over k of x[r][k] * w[n][k].
//
// An output element depends only on its own row of x and its own row of w. Its sum runs over k in ascending order, with
// the same order and roundings for every number of rows, range of columns and instruction set. The only exception is
// AMX, which rounds products of bf16 weights differently. Nothing here allocates memory, locks or keeps state, so any
// thread may call it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/readahead.h"

namespace engine {

// The storage formats of a matrix's weights. A group of 32 elements along k (16 in u6 and nvfp4) shares its scale, in
// fp16, and its offset, in bf16. Minifloats are stored as indices of 16 values (E2M1). Their scale is one byte: a power
// of two (E8M0), or E4M3. In f8, whose elements are E4M3, any number of elements shares a scale in float32.
enum class WeightFormat : int32_t {
  u4 = 0,         // (code - 8) * scale             Q4_0
  u4_offset = 1,  // (code - 8) * scale + offset    Q4_1, Q4_K
  u5_offset = 2,  // (code - 16) * scale + offset   Q5_0, Q5_1, Q5_K
  u6 = 3,         // (code - 32) * scale            Q6_K
  mxfp4 = 4,      // value(code) * scale            MXFP4
  nvfp4 = 5,      // value(code) * scale            NVFP4, times the matrix's scale
  u8 = 6,         // (code - 128) * scale           Q8_0
  bf16 = 7,
  f16 = 8,
  f32 = 9,
  f8 = 10,          // value(code) * scale
  bf16_tiles = 11,  // for matrices of a few rows, which do not fill a block of bf16
};
constexpr int kNumWeightFormats = 12;

// The storage formats of a row of activations, for products with weights of each format.
enum class ActivationKind : int32_t {
  int8 = 0,  // used by the integer formats: int8 and a float32 scale per group of 32
  bf16 = 1,  // used by bf16, bf16_tiles and f8
  f32 = 2,   // used by f16 and f32
  // For the integer formats: int8, with a second int8 for outliers. Without the second int8, an outlier would enlarge
  // its group's scale so much that the rest of the group would have few levels.
  int8_split = 3,
};

// A matrix [n, k]. pack_rows fills `data`, which is aligned to 64 bytes and not owned.
struct PackedWeight {
  WeightFormat format;
  int32_t n, k;
  int32_t group;  // the elements along k that share a scale, in f8: an even number, or k; the last group may be shorter
  float scale;    // the scale of all elements, in nvfp4
  uint8_t* data;
};

// Columns [n_begin, n_end) of the output are computed from whole tiles of packed rows. So n_begin must be a multiple of
// this number, and n_end either a multiple of it or n. Multiples of 4 * kColumnTile are fastest.
constexpr int kColumnTile = 16;

// Returns the size in bytes of one row of k activations, a multiple of 16. Row r of a buffer begins at r *
// activation_row_bytes(kind, k). Buffers are aligned to 64 bytes.
size_t activation_row_bytes(ActivationKind kind, int k);

// Returns the offset in bytes of column `column` in a row of activations. The columns before it must be whole groups,
// or whole pairs of bf16, and the kind must not be int8_split.
size_t activation_offset(ActivationKind kind, int column);

// Converts rows of x, which are x_stride floats apart, to rows of `out`. The int8 kinds need k % 32 == 0. A NaN or an
// infinity makes its whole group NaN, and therefore all outputs of its row.
void quantize_rows(ActivationKind kind, const float* x, ptrdiff_t x_stride, int rows, int k, void* out);

// Computes out[r * out_stride + (n - n_begin)] for r in [0, rows) and n in [n_begin, n_end). `x` is the output of
// quantize_rows, with the kind that belongs to the weights' format. Weights are read from memory once per 64 rows or
// more, whatever the number of rows. `readahead` advances by at least one step for every kReadaheadWeights weights
// times kReadaheadRows rows, but not in products with few sums, nor in those of bf16_tiles.
void linear_rows(const PackedWeight& w, ActivationKind kind, const void* x, int rows, int n_begin, int n_end,
                 float* out, ptrdiff_t out_stride, Readahead& readahead);

// Returns the number of rows for which weights are unpacked once. Products of more rows unpack them again.
int rows_at_once(WeightFormat format);

constexpr int kReadaheadWeights = 1024, kReadaheadRows = 6;

// Writes the k elements of a row of the matrix as float32, for embeddings.
void unpack_weight_row(const PackedWeight& w, int row, float* out);

}  // namespace engine
