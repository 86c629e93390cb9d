#include "linear/bf16_block.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "runtime/rounding.h"

namespace engine {
namespace {

// Returns the index, in the codes and low bytes of a coded step, of the first of a column's two elements. The second
// one follows.
int interleaved_byte(int column) {
  const int tile = column / kColumnTile % 2, in_tile = column % kColumnTile;
  return in_tile / 4 * 16 + tile * 8 + in_tile % 4 * 2;
}

// Returns the columns in the order in which plain steps store them.
std::vector<uint16_t> transposed(const uint8_t* rows, ptrdiff_t row_bytes, int columns, int k) {
  std::vector<uint16_t> steps(size_t(bf16_steps(k)) * kBF16BlockColumns * 2);
  for (int column = 0; column < columns; column++, rows += row_bytes) {
    uint16_t* out = steps.data() + 2 * column;
    for (int i = 0; i < k; i++) {
      uint16_t bits;
      std::memcpy(&bits, rows + 2 * i, 2);
      out[size_t(i / 2) * kBF16BlockColumns * 2 + i % 2] = without_subnormals(bits);
    }
  }
  return steps;
}

// Chooses the kHighBytes most common high bytes.
void choose_high_bytes(const std::vector<uint16_t>& weights, uint8_t* chosen) {
  uint32_t counts[2][256] = {};
  for (size_t i = 0; i < weights.size(); i += 2) {
    counts[0][weights[i] >> 8]++;
    counts[1][weights[i + 1] >> 8]++;
  }
  uint8_t order[256];
  std::iota(order, order + 256, uint8_t(0));
  std::partial_sort(order, order + kHighBytes, order + 256, [&](uint8_t a, uint8_t b) {
    const uint32_t of_a = counts[0][a] + counts[1][a], of_b = counts[0][b] + counts[1][b];
    return of_a != of_b ? of_a > of_b : a < b;
  });
  std::copy_n(order, kHighBytes, chosen);
}

constexpr uint8_t kNoCode = 0x80;

// Returns false if there is no code for the high byte of some weight.
bool pack_coded_step(const uint16_t* weights, const uint8_t (&code_of)[256], uint8_t* step) {
  uint8_t codes[2 * kBF16BlockColumns], any = 0;
  for (int i = 0; i < 2 * kBF16BlockColumns; i++) any |= codes[i] = code_of[weights[i] >> 8];
  if (any & kNoCode) return false;
  for (int column = 0; column < kBF16BlockColumns / 2; column++) {
    const int byte = interleaved_byte(column);
    for (int i = 0; i < 2; i++) {
      const int first = 2 * column + i, second = first + kBF16BlockColumns;
      step[byte + i] = uint8_t(codes[first] | codes[second] << 4);
      step[kTileStepBytes + byte + i] = uint8_t(weights[first]);
      step[2 * kTileStepBytes + byte + i] = uint8_t(weights[second]);
    }
  }
  return true;
}

void set_bf16_block(const PackedWeight& w, int index, uint64_t at) {
  std::memcpy(w.data + index * sizeof(at), &at, sizeof(at));
}

size_t block_bytes(const uint8_t* block, int k) {
  const int steps = bf16_steps(k);
  int plain = 0;
  for (int first = 0; first < steps; first += kMaskSteps)
    plain += __builtin_popcountll(plain_steps(block, first / kMaskSteps));
  return bf16_steps_at(k) + size_t(steps - plain) * kCodedStepBytes + size_t(plain) * kPlainStepBytes;
}

}  // namespace

void pack_bf16_block(const PackedWeight& w, int index, const uint8_t* rows, ptrdiff_t row_bytes, int columns) {
  const uint64_t at = bf16_table_bytes(w.n) + index * bf16_block_capacity(w.k);
  set_bf16_block(w, index, at);
  uint8_t* block = w.data + at;
  const std::vector<uint16_t> weights = transposed(rows, row_bytes, columns, w.k);
  choose_high_bytes(weights, block);
  uint8_t code_of[256];
  std::fill_n(code_of, 256, kNoCode);
  for (uint8_t code = 0; code < kHighBytes; code++) code_of[block[code]] = code;
  uint8_t* step = block + bf16_steps_at(w.k);
  for (int first = 0; first < bf16_steps(w.k); first += kMaskSteps) {
    uint64_t mask = 0;
    for (int s = first; s < std::min(first + kMaskSteps, bf16_steps(w.k)); s++) {
      const uint16_t* of_step = weights.data() + size_t(s) * kBF16BlockColumns * 2;
      if (pack_coded_step(of_step, code_of, step)) {
        step += kCodedStepBytes;
      } else {
        std::memcpy(step, of_step, kPlainStepBytes);
        step += kPlainStepBytes;
        mask |= uint64_t(1) << (s - first);
      }
    }
    std::memcpy(block + kHighBytes + first / kMaskSteps * sizeof(mask), &mask, sizeof(mask));
  }
}

size_t join_bf16_blocks(const PackedWeight& w) {
  size_t end = bf16_table_bytes(w.n);
  for (int index = 0; index < bf16_blocks(w.n); index++) {
    const uint8_t* block = bf16_block(w, index);
    const size_t bytes = block_bytes(block, w.k);
    std::memmove(w.data + end, block, bytes);
    set_bf16_block(w, index, end);
    end += bytes;
  }
  return end;
}

void unpack_bf16_row(const PackedWeight& w, int row, float* out) {
  const uint8_t* block = bf16_block(w, row / kBF16BlockColumns);
  const int column = row % kBF16BlockColumns, half = column / (kBF16BlockColumns / 2);
  const int byte = interleaved_byte(column);
  const uint8_t* step = block + bf16_steps_at(w.k);
  uint64_t mask = 0;
  for (int s = 0; s < bf16_steps(w.k); s++, mask >>= 1) {
    if (s % kMaskSteps == 0) mask = plain_steps(block, s / kMaskSteps);
    uint16_t pair[2];
    if (mask & 1) {
      std::memcpy(pair, step + 4 * column, sizeof(pair));
      step += kPlainStepBytes;
    } else {
      for (int i = 0; i < 2; i++)
        pair[i] = uint16_t(step[(1 + half) * kTileStepBytes + byte + i] | block[step[byte + i] >> 4 * half & 15] << 8);
      step += kCodedStepBytes;
    }
    for (int i = 0; i < 2 && 2 * s + i < w.k; i++) out[2 * s + i] = from_bf16(pair[i]);
  }
}

}  // namespace engine
