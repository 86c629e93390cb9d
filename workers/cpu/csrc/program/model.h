// A recorded model: its sizes and its operations, which stay the same from step to step.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention.h"
#include "linear/linear.h"
#include "rows/kernels.h"

namespace engine {

// The sizes of a rank's share of a model: heads and intermediate size are those of the share.
struct ModelShape {
  int32_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size;
  int32_t block_size;
  KVFormat kv_format;
  Activation activation;
  int32_t num_threads;
};

// With several ranks, `part` is this rank's part of a sum over the ranks.
enum class OpKind : int32_t {
  embed = 0,         // residual = scale * the token's row of parts[0], or of hidden if there are no parts; fills the
                     // rotary tables. With several ranks: part = the row if this rank has it, else 0; residual = 0
  quantize = 1,      // activations[0] = residual, normed by vectors[0] if there is one
  linear = 2,        // target = activations[source] * parts + vectors
  gated_linear = 3,  // activations[1] = activation(gate) * up; parts and vectors are those of gate and up
  rotate_store = 4,  // norms and rotates queries and keys; stores queries for the next attention, keys and values
  attention = 5,     // activations[1] = attention
  norm_add = 6,      // residual += scale * block normed by vectors[0]
  final_norm = 7,    // hidden = residual, normed by vectors[0] if there is one
  head = 8,          // logits of the rows asked for; always the last operation
  sum = 9,           // target = the parts of all ranks, added in their order, + vectors[0] if there is one
};

// What the result of a product is written to. For `residual` it is multiplied by the scale and added.
enum class LinearTarget : int32_t { qkv = 0, residual = 1, block = 2, part = 3 };
enum class QKNorm : int32_t { none = 0, head = 1, full = 2 };

constexpr int kMaxParts = 3;

struct Op {
  OpKind kind;
  ActivationKind input_kind;       // of the activations it reads
  ActivationKind activation_kind;  // of the activations it writes
  int32_t source;
  LinearTarget target;
  int32_t layer, group;  // of the KV cache
  int32_t rope;          // the number of a rotary embedding, or -1
  QKNorm qk_norm;
  int32_t num_parts;
  float scale, eps;
  AttentionLayer attention;
  const PackedWeight* parts[kMaxParts];  // side by side
  const float* vectors[kMaxParts];       // one for each part, or null
};

struct Model {
  explicit Model(const ModelShape& shape);

  int heads_per_kv_head() const { return shape.num_heads / shape.num_kv_heads; }
  int qkv_size() const { return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim; }
  size_t index_of(const Op& op) const { return size_t(&op - ops.data()); }

  const ModelShape shape;
  const KVLayout kv;
  const AttentionKernels& attention;
  const RowKernels& rows;
  std::vector<Op> ops;
};

}  // namespace engine
