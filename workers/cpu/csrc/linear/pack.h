// Packs weights into the layout of the linear kernels, some rows at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/linear.h"

namespace engine {

// Element types from which weights can be packed, with their numbers in GGUF.
enum class SourceType : int32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  bf16 = 30,
  mxfp4 = 39,
  nvfp4 = 40,
  f8 = 1000,  // not in GGUF: E4M3, then the float32 scales of the row's groups
};

// Returns whether weights of a type can be packed in a format. Every quantized type has one format, which keeps its
// values, except that the product of the two scales of K types is rounded to fp16, and offsets of centered codes to
// bf16. Float types can also be quantized to u4_offset and u8.
bool can_pack(SourceType type, WeightFormat format);

// Returns the bytes to allocate for a matrix [n, k]. The memory must be zeroed, because padding rows must be zero.
size_t packed_bytes(WeightFormat format, int n, int k, int group);

// The number of bf16 rows that are packed as one block.
constexpr int kRowsTogether = 64;

// Packs `rows` rows, which are source_row_bytes apart, as the rows of a matrix from first_row on. Integer formats need
// k % 32 == 0, and K types k % 256 == 0. For bf16, the range must begin at a multiple of kRowsTogether, and end at one
// or at the last row. Threads may pack disjoint rows at the same time. Returns false, after packing only part of the
// rows, if there is a NaN or an infinity that the format cannot represent.
bool pack_rows(const PackedWeight& w, SourceType type, const uint8_t* source, ptrdiff_t source_row_bytes, int first_row,
               int rows);

// Completes a matrix after all its rows were packed. Returns how many of the packed_bytes it needs; the rest can be
// freed.
size_t finish_packing(const PackedWeight& w);

}  // namespace engine
