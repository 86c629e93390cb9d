// Packing of weights into the layout of the linear kernels, a range of rows at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/linear.h"

namespace engine {

// Element types that weights are packed from, by their numbers in GGUF.
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
};

// Returns whether weights of a type can be packed in a format. Each quantized type has one format, which keeps its
// values; for K types the product of their two scales is rounded to fp16, and offsets of centered codes to bf16. Float
// types also pack into u4_offset and u8, rounded to the nearest value.
bool can_pack(SourceType type, WeightFormat format);

// Bytes to pack a matrix [n, k] into. Padding rows are to be zero: allocate zeroed memory.
size_t packed_bytes(WeightFormat format, int n, int k);

// bf16 is packed kRowsTogether rows at a time.
constexpr int kRowsTogether = 64;

// Pack `rows` rows, source_row_bytes apart, as rows first_row and following of a matrix. Integer formats need
// k % 32 == 0, K types k % 256 == 0; bf16 needs bounds that are multiples of kRowsTogether, but for the last row's.
// Threads may pack disjoint rows together. Returns false, having packed a part, at a NaN or an infinity that the format
// does not have.
bool pack_rows(const PackedWeight& w, SourceType type, const uint8_t* source, ptrdiff_t source_row_bytes,
               int first_row, int rows);

// Call it when all rows are packed. Returns how many of the packed_bytes, from the first, the matrix needs.
size_t finish_packing(const PackedWeight& w);

}  // namespace engine
