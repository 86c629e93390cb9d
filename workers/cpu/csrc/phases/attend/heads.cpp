#include "phases/attend/heads.h"

#include <algorithm>
#include <cmath>

namespace engine {

namespace {

constexpr float kSmallestNorm = 1e-6f;

}  // namespace

void Heads::share_squares(const Op& op, const float* qkv, int row) const {
  const int queries = op.num_heads * op.head_dim, keys = op.num_kv_heads * op.head_dim;
  float* const part = ranks_.own_part(row);
  part[0] = model_.rows.dot(qkv, qkv, queries);
  part[1] = model_.rows.dot(qkv + queries, qkv + queries, keys);
}

void Heads::norm_queries_and_keys(const Op& op, float* qk, int row) const {
  const int num_heads = op.num_heads, head_dim = op.head_dim;
  const int num_kv_heads = op.num_stored ? op.num_kv_heads : 0;
  if (op.qk_norm == QKNorm::bounded) {
    const float bound = op.relative_biases->head_bound;
    limit_norms(qk, num_heads, head_dim, op.vectors[0], bound);
    limit_norms(qk + num_heads * head_dim, num_kv_heads, head_dim, nullptr, bound);
  } else if (op.qk_norm == QKNorm::each_head) {
    const float *weight = op.vectors[0], *bias = op.vectors[1];
    for (int i = 0; i < (num_heads + num_kv_heads) * head_dim; i += head_dim)
      if (model_.shape.norm == NormKind::layer)
        model_.rows.layer_norm(qk + i, weight + i, bias ? bias + i : nullptr, op.eps, head_dim, qk + i);
      else
        model_.rows.rms_norm(qk + i, weight + i, op.eps, head_dim, qk + i);
  } else if (op.target == LinearTarget::part) {
    norm_over_ranks(op, qk, num_heads, 0, row);
    norm_over_ranks(op, qk + num_heads * head_dim, num_kv_heads, 1, row);
  } else if (op.qk_norm != QKNorm::none) {
    norm_equal(op, qk, num_heads, op.vectors[0]);
    norm_equal(op, qk + num_heads * head_dim, num_kv_heads, op.vectors[1]);
  }
}

void Heads::norm_equal(const Op& op, float* heads, int num_heads, const float* weight) const {
  const int head_dim = op.head_dim, size = num_heads * head_dim;
  if (op.qk_norm == QKNorm::full) return model_.rows.rms_norm(heads, weight, op.eps, size, heads);
  if (op.qk_norm == QKNorm::full_layer)
    return model_.rows.layer_norm(heads, weight, weight + size, op.eps, size, heads);
  for (int h = 0; h < num_heads; h++, heads += head_dim) model_.rows.rms_norm(heads, weight, op.eps, head_dim, heads);
}

// A head that several ranks have counts once per rank, both in the sum and in the number of elements.
void Heads::norm_over_ranks(const Op& op, float* heads, int num_heads, int index, int row) const {
  const int size = num_heads * op.head_dim;
  float squares = 0.0f;
  for (int rank = 0; rank < ranks_.num_ranks(); rank++) squares += ranks_.part_of(rank, row)[index];
  model_.rows.multiply(heads, op.vectors[index], size, heads);
  model_.rows.scale(heads, 1.0f / std::sqrt(squares / float(size * ranks_.num_ranks()) + op.eps), size);
}

void Heads::limit_norms(float* heads, int num_heads, int size, const float* scales, float bound) const {
  if (scales) model_.rows.multiply(heads, scales, num_heads * size, heads);
  for (int h = 0; h < num_heads; h++, heads += size) {
    const float norm = std::sqrt(model_.rows.dot(heads, heads, size)) + kSmallestNorm;
    if (norm > bound) model_.rows.scale(heads, bound / norm, size);
  }
}

void Heads::scale_queries(const Op& op, float* queries, int size, int row) const {
  const auto* scaling = reinterpret_cast<const QueryScaling*>(op.vectors[2]);
  if (!scaling) return;
  model_.rows.scale(queries, scaling->factor(slice_.step.positions[slice_.first_token + row]), size);
}

// If values have no projection, they are the projected keys. The keys are rotated in place afterwards.
const float* Heads::place_values(const Op& op, float* qkv) const {
  const int head_dim = op.head_dim, size = op.num_kv_heads * head_dim;
  if (!op.num_stored) return nullptr;
  float* const values = qkv + op.num_heads * head_dim + size;
  if (op.num_stored == 1) std::copy_n(values - size, size, values);
  for (int i = 0; op.norms_values && i < size; i += head_dim)
    model_.rows.rms_norm(values + i, nullptr, op.eps, head_dim, values + i);
  return values;
}

void Heads::rotate(const Op& op, float* qkv, int row) const {
  const int size = op.head_dim;
  float* const heads = qkv + op.first_column;
  for (int h = 0; op.vectors[0] && h < op.num_heads; h++)
    model_.rows.rms_norm(heads + h * size, op.vectors[0], op.eps, size, heads + h * size);
  model_.rows.scale(heads, op.scale, op.num_heads * size);
  const RotaryTables::Angles angles = ropes_.angles(op.rope, row);
  model_.rows.rotate(heads, op.num_heads, size, angles.cosines, angles.sines, angles.half);
}

void Heads::average(const Op& op, float* qkv) const {
  const int size = op.head_dim, heads = op.num_heads / op.num_kv_heads;
  float *query = qkv, *key = qkv + op.num_heads * size;
  float *out = qkv + op.first_column, *key_out = out + op.num_heads * size;
  for (int g = 0; g < op.num_kv_heads; g++, key += size, key_out += size) {
    std::copy_n(key, size, key_out);
    for (int h = 0; h < heads; h++, query += size, out += size) {
      std::copy_n(key, size, out);
      model_.rows.add_scaled(out, query, 1.0f, size);
      model_.rows.scale(out, 0.5f, size);
      model_.rows.add_scaled(key_out, query, 1.0f / heads, size);
    }
    model_.rows.scale(key_out, 0.5f, size);
  }
}

}  // namespace engine
