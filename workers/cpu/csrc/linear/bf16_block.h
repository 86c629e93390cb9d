// bf16 weights, stored losslessly in a little more than 12 bits each.
//
// The high byte of a bf16 number is its sign and its exponent without the last bit. Few of the 256 values are common in
// a trained matrix: its weights have about the same magnitude, and each smaller binade has half as many of them. (For
// that reason DFloat11, arXiv 2504.11651, stores exponents in a variable-length code.) So a block has a dictionary of
// 16 high bytes and stores four bits for each weight's high byte. A step with any other high byte, one or two in a
// hundred, is stored as it is. All weights are restored bit for bit, except subnormal numbers. They are packed as
// zeros, because the bf16 instructions treat them as zeros.
//
// A matrix is a table of where its blocks are, then the blocks. A block is 64 columns of the output, which are rows of
// the matrix:
//   high bytes  the 16 high bytes that codes index
//   masks       a uint64 for every 64 steps, with a bit set for each step that is plain
//   steps       one for each pair along k, without gaps, beginning at a multiple of 64 bytes. A coded step is
//                 codes      64 bytes: those of the first two tiles in the low nibbles, those of the others in the high
//                 low bytes  64 of the first two tiles, 64 of the others
//               in such an order that interleaving the 16-byte lanes of a vector of low bytes and a vector of high
//               bytes results in one vector for each tile. A plain step is [64][2] bf16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "linear/linear.h"

namespace engine {

constexpr int kBF16BlockColumns = 4 * kColumnTile;
constexpr int kHighBytes = 16;
constexpr int kMaskSteps = 64;
constexpr int kTileStepBytes = 4 * kColumnTile;
constexpr int kCodedStepBytes = 3 * kTileStepBytes;
constexpr int kPlainStepBytes = 4 * kTileStepBytes;

constexpr int bf16_steps(int k) { return (k + 1) / 2; }
constexpr int bf16_blocks(int n) { return (n + kBF16BlockColumns - 1) / kBF16BlockColumns; }

// Returns the offset in bytes at which the steps of a block begin.
constexpr size_t bf16_steps_at(int k) {
  return (kHighBytes + size_t(bf16_steps(k) + kMaskSteps - 1) / kMaskSteps * sizeof(uint64_t) + 63) / 64 * 64;
}

// The maximum size of a block in bytes, and the size of a table.
constexpr size_t bf16_block_capacity(int k) { return bf16_steps_at(k) + size_t(bf16_steps(k)) * kPlainStepBytes; }
constexpr size_t bf16_table_bytes(int n) { return (size_t(bf16_blocks(n)) * sizeof(uint64_t) + 63) / 64 * 64; }

// Returns a mask of the plain steps among the 64 steps from 64 * i on, with the first step in the lowest bit.
inline uint64_t plain_steps(const uint8_t* block, int i) {
  uint64_t mask;
  std::memcpy(&mask, block + kHighBytes + i * sizeof(mask), sizeof(mask));
  return mask;
}

inline const uint8_t* bf16_block(const PackedWeight& w, int index) {
  uint64_t at;
  std::memcpy(&at, w.data + index * sizeof(at), sizeof(at));
  return w.data + at;
}

// Packs `columns` rows of bf16, which are row_bytes apart, as block `index`. Every block has room for the maximum size,
// so threads may pack different blocks at the same time.
void pack_bf16_block(const PackedWeight& w, int index, const uint8_t* rows, ptrdiff_t row_bytes, int columns);

// The bf16 instructions treat subnormal numbers as zeros of the same sign, so these are stored.
inline uint16_t without_subnormals(uint16_t bits) { return bits & 0x7f80 ? bits : bits & 0x8000; }

// Moves all blocks next to one another. Returns how many bytes the matrix takes afterwards.
size_t join_bf16_blocks(const PackedWeight& w);

// Writes a row of the matrix as float32.
void unpack_bf16_row(const PackedWeight& w, int row, float* out);

}  // namespace engine
