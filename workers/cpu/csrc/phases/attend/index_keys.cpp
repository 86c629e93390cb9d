#include "phases/attend/index_keys.h"

#include <algorithm>
#include <cmath>

namespace engine {

namespace {

// Writes the cosines and sines behind a key, times its largest number, so that a cache in int8 keeps their precision.
void write_angles(const RotaryTables::Angles& angles, int count, float* key, int dim) {
  float largest = 0.0f;
  for (int i = 0; i < dim; i++) largest = std::max(largest, std::abs(key[i]));
  if (largest == 0.0f) largest = 1.0f;
  for (int i = 0; i < count; i++) {
    key[dim + i] = angles.cosines[i] * largest;
    key[dim + count + i] = angles.sines[i] * largest;
  }
}

// Restores what `write_angles` wrote.
RotaryTables::Angles read_angles(float* stored, int count, float factor) {
  for (int i = 0; i < count; i++) {
    const float length = std::hypot(stored[i], stored[count + i]);
    const float scale = length == 0.0f ? 0.0f : factor / length;
    stored[i] *= scale;
    stored[count + i] *= scale;
  }
  return {stored, stored + count, count};
}

}  // namespace

void IndexKeys::store(const Op& op, float* qkv, int row) const {
  const ModelShape& shape = model_.shape;
  const ChoiceRule& choice = op.choice;
  const int dim = shape.index_dim, num_queries = choice.num_queries ? choice.num_queries : op.num_kv_heads;
  float *const queries = qkv + op.first_column, *const key = queries + num_queries * dim;
  for (int h = 0; h < num_queries; h++)
    model_.rows.rms_norm(queries + h * dim, op.vectors[0], op.eps, dim, queries + h * dim);
  if (!choice.has_groups) model_.rows.rms_norm(key, op.vectors[1], op.eps, dim, key);
  // The operation that stores the token's key sees these.
  if (!model_.rows.all_finite(key, dim)) std::fill_n(qkv, op.num_heads * op.head_dim, std::nanf(""));
  if (op.rope >= 0) {
    const RotaryTables::Angles angles = ropes_.angles(op.rope, row);
    model_.rows.rotate(queries, num_queries + !choice.has_groups, dim, angles.cosines, angles.sines, angles.half);
    if (choice.has_groups) write_angles(angles, shape.index_inputs / 2, key, dim);
  }
  store_key(op, model_.kv(op).of_own_index(), index_cache(op), key, row);
}

void IndexKeys::store_key(const Op& op, const KVLayout& layout, uint8_t* cache, const float* key, int row) const {
  const int slot = slice_.step.groups[op.group].slot_mapping[slice_.first_token + row];
  model_.attention.store(layout, cache, slot / layout.block_size, slot % layout.block_size, 0, key, nullptr);
}

std::vector<float> IndexKeys::read_group(const Op& op, const KVLayout& layout, const uint8_t* cache, int first,
                                         int count, int row) const {
  const int size = op.choice.block_size, start = slice_.step.positions[slice_.first_token + row] + 1 - size;
  const StepGroup& group = slice_.step.groups[op.group];
  const int32_t* blocks = group.block_table + slice_.table_row(slice_.sequence_of(row)) * group.block_table_stride;
  std::vector<float> tokens(size_t(size) * count);
  for (int i = 0; i < size; i++)
    model_.attention.load(layout, cache, blocks[(start + i) / layout.block_size], (start + i) % layout.block_size,
                          first, count, &tokens[size_t(i) * count]);
  return tokens;
}

// All index keys and logits are read from the cache, so the result does not depend on which of them are from this step.
// The key of the last token is still in the projection, and is stored again with the index key of the group. If the
// token is replaced later, as after a rejected draft, its group gets a new one.
void IndexKeys::summarize_group(const Op& op, float* qkv, int row) const {
  if (!ends_group(op, row)) return;
  const KVLayout kv = model_.kv(op);
  const int size = op.choice.block_size, dim = kv.index_dim, stored = dim + kv.index_inputs;
  const std::vector<float> tokens = read_group(op, kv, cache(op), kv.head_dim, stored, row);
  float* const index_key = qkv + kv.head_dim;
  for (int d = 0; d < dim; d++) {
    const auto logit = [&](int i) { return tokens[i * stored + dim + d] + op.vectors[0][i * dim + d]; };
    float most = logit(0), weights = 0.0f, sum = 0.0f;
    for (int i = 1; i < size; i++) most = std::max(most, logit(i));
    for (int i = 0; i < size; i++) {
      const float weight = std::exp(logit(i) - most);
      weights += weight;
      sum += weight * tokens[i * stored + d];
    }
    index_key[d] = sum / weights;
  }
  store_key(op, kv, cache(op), qkv, row);
}

void IndexKeys::average_group(const Op& op, int row) const {
  if (!ends_group(op, row)) return;
  const KVLayout layout = model_.kv(op).of_own_index();
  const int size = op.choice.block_size, dim = layout.index_dim, num_angles = layout.index_inputs / 2;
  std::vector<float> tokens = read_group(op, layout, index_cache(op), 0, layout.stored_dim(), row), memory;
  float* const mean = tokens.data();
  for (int i = 1; i < size; i++) model_.rows.add_scaled(mean, mean + size_t(i) * layout.stored_dim(), 1.0f, dim);
  model_.rows.scale(mean, 1.0f / float(size), dim);
  model_.rows.rms_norm(mean, op.vectors[1], op.eps, dim, mean);
  if (op.rope >= 0) {
    const int first = slice_.step.positions[slice_.first_token + row] + 1 - size;
    const RotaryTables::Angles angles = num_angles ? read_angles(mean + dim, num_angles, ropes_.factor(op.rope))
                                                   : ropes_.angles_at(op.rope, first, memory);
    model_.rows.rotate(mean, 1, dim, angles.cosines, angles.sines, angles.half);
  }
  store_key(op, layout, index_cache(op), mean, row);
}

}  // namespace engine
