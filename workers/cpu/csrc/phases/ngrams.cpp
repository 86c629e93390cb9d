#include "phases/ngrams.h"

#include <algorithm>
#include <cmath>

#include "model/token_digits.h"

namespace engine {

namespace {

constexpr float kLeastScore = 1e-6f;

// Returns the gate of a stream, given the product of its key and its query.
float gate_of(float score) {
  if (score == 0.0f) return 0.5f;
  const float root = std::sqrt(std::max(std::abs(score), kLeastScore));
  return 1.0f / (1.0f + std::exp(-std::copysign(root, score)));
}

}  // namespace

// Digits are stored of the token plus 1.
int32_t Ngrams::token_before(const Op& op, int row, int distance) const {
  if (distance > slice_.step.positions[slice_.first_token + row]) return -1;
  if (distance <= mixers_.rows_before(row)) return token_of_digits(inputs_.row(row - distance));
  return token_of_digits(mixers_.stored_input(op, row, distance) + op.mixer->num_convolved) - 1;
}

void Ngrams::embed(const Op& op, const Rows& rows, int row) const {
  const NgramTable& ngrams = *op.ngrams;
  const PackedWeight& table = *op.parts[0];
  float* out = op.target == LinearTarget::part ? ranks_.own_part(row) : rows.qkv(row);
  int64_t hash = 0;
  bool is_after_end = false;
  for (int distance = 0, head = 0; distance < ngrams.longest; distance++) {
    int32_t token = is_after_end ? -1 : token_before(op, row, distance);
    if (token < 0) token = ngrams.end_id;
    hash ^= token * ngrams.multipliers[distance];
    is_after_end |= distance && token == ngrams.end_id;
    for (int i = 0; distance && i < ngrams.num_heads; i++, head++, out += table.k) {
      const int64_t index = hash % ngrams.sizes[head] + ngrams.first_rows[head] - ngrams.first_row;
      if (index >= 0 && index < table.n)
        unpack_weight_row(table, int(index), out);
      else
        std::fill_n(out, table.k, 0.0f);
    }
  }
}

void Ngrams::gate(const Op& op, const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size, count = model_.shape.num_streams;
  const float *const key_norm = op.vectors[0], *const query_norm = op.vectors[1], *const input_norm = op.vectors[2];
  float *const value = rows.qkv(row), *const inputs = value + size, *const query = rows.normed(row);
  for (int i = 0; i < count; i++) {
    const size_t first = size_t(i) * size;
    float *const key = inputs + first, *const stream = rows.streams(row) + first;
    model_.rows.rms_norm(key, key_norm + first, op.eps, size, key);
    model_.rows.rms_norm(stream, query_norm + first, op.eps, size, query);
    const float gate = gate_of(model_.rows.dot(key, query, size) / std::sqrt(float(size)));
    std::copy_n(value, size, key);
    model_.rows.scale(key, gate, size);
    model_.rows.add_scaled(stream, key, 1.0f, size);
    model_.rows.rms_norm(key, input_norm + first, op.eps, size, key);
  }
  write_digits(token_of_digits(inputs_.row(row)) + 1, inputs + size_t(count) * size);
}

}  // namespace engine
