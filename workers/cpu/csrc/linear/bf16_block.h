// bf16 weights without loss in 12 bits and a little more.
//
// The high byte of a bf16 number is its sign and all of its exponent but the last bit, and few of the 256
// are common in a trained matrix: its weights have about the same magnitude, and of smaller ones each binade
// has half as many (DFloat11, arXiv 2504.11651, stores their exponents in a code of variable length for that
// reason). So a block has a dictionary of 16 high bytes and stores four bits for each. A step where another
// one occurs, one or two in a hundred, is stored as it is. Whatever the weights are, they come out bit for bit, but for
// subnormal numbers: these are packed as zeros, which they are to the bf16 instructions.
//
// A matrix is a table of where its blocks are, then the blocks. A block is 64 columns, rows of the matrix:
//   high bytes  the 16 that codes stand for
//   masks       a uint64 for 64 steps: which of them are plain
//   steps       one per pair along k, from a multiple of 64 bytes on, one after another. Coded ones are
//                 codes      64 bytes: of the first two tiles in the low nibbles, of the others in the high ones
//                 low bytes  64 of the first two tiles, 64 of the others
//               in the order in which the 16-byte lanes of two vectors, low bytes and high bytes, interleave
//               to a vector of each tile; plain ones are [64][2] bf16.
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

// Where the steps of a block begin.
constexpr size_t bf16_steps_at(int k) {
  return (kHighBytes + size_t(bf16_steps(k) + kMaskSteps - 1) / kMaskSteps * sizeof(uint64_t) + 63) / 64 * 64;
}

// What a block takes at most, and a table.
constexpr size_t bf16_block_capacity(int k) { return bf16_steps_at(k) + size_t(bf16_steps(k)) * kPlainStepBytes; }
constexpr size_t bf16_table_bytes(int n) { return (size_t(bf16_blocks(n)) * sizeof(uint64_t) + 63) / 64 * 64; }

// Of the steps from 64 * i on, as bits from the lowest.
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

// Pack `columns` rows of at most a block, bf16 and row_bytes apart, as block `index`. Each has the room that it could
// need; threads may pack different ones together.
void pack_bf16_block(const PackedWeight& w, int index, const uint8_t* rows, ptrdiff_t row_bytes, int columns);

// Move all blocks next to one another. Returns how many bytes the matrix takes then.
size_t join_bf16_blocks(const PackedWeight& w);

void unpack_bf16_row(const PackedWeight& w, int row, float* out);

}  // namespace engine
