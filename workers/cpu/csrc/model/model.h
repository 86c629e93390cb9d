// A recorded model: its sizes and its operations, which stay the same from step to step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention/attention.h"
#include "experts/router.h"
#include "linear/linear.h"
#include "model/mixer.h"
#include "rows/kernels.h"

namespace engine {

enum class NormKind : int32_t { rms = 0, layer = 1 };

// The sizes of multi-head latent attention in a layer of this rank. All heads share one key: `kv_rank` elements, from
// which values are also computed, then `rotary_dim` rotated ones, perhaps then zeros, `key_dim` in all. A head's query
// has `plain_dim` and `rotary_dim` elements, its value `value_dim`.
//
// A token's projection consists of: the key, its index key and the logits behind that; the vector from which queries
// are computed, then the queries; then their products with the matrices that expand keys; the weights and queries of
// the indexer's heads; and the gates.
struct LatentShape {
  int32_t num_heads, key_dim;
  int32_t query_inputs;  // the number of elements from which queries are computed; 0 if they come from hidden states
  int32_t kv_rank, plain_dim, rotary_dim, value_dim;
  int32_t norms_rotated_key;  // whether weights of a norm of the rotated key follow those of the latent vector
  int32_t index_heads;        // the heads of an indexer, which chooses keys by index keys; 0 without one
  int32_t index_dim;          // the elements of an index key; 0 without an indexer
  int32_t index_inputs;       // the numbers that are stored behind an index key, if keys are chosen in groups; or 0
  int32_t gate_dim;           // the number of gates of a head: one for all of its value, one for each element, or 0

  int query_dim() const { return plain_dim + rotary_dim; }
  // The offset of a token's queries, of their products, and so on, within its projection.
  int query_offset() const { return key_dim + index_dim + index_inputs; }
  int product_offset() const { return query_offset() + std::max(query_inputs, num_heads * query_dim()); }
  int index_offset() const { return product_offset() + num_heads * key_dim; }
  int gate_offset() const { return index_offset() + index_heads * (1 + index_dim); }
};

// The sizes of one rank's part of a model: heads and intermediate size are those of the part. If layers differ,
// `num_kv_heads` is the smallest number, and `num_heads` and `head_dim` are the largest ones of any layer.
struct ModelShape {
  int32_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size;
  int32_t block_size;
  int64_t block_bytes;  // the size of a block in a tensor of the KV cache
  KVFormat kv_format;
  Activation activation;
  Activation output_gate;  // the activation of attention's gates
  float gate_cap, up_cap;  // the soft caps of the factors of a gated product with SiLU, or 0
  NormKind norm;           // the kind of all norms
  int32_t norm_groups;     // the equal parts of a hidden state that an RMS norm divides by their own root mean squares
  int32_t is_bidirectional;  // a token sees its whole sequence, of which a step has all tokens or none
  int32_t keeps_block;       // the residual stream is normed between a block's last product and its addition
  // the maximum number of logits of a router, including the gate of the shared experts; 0 without experts
  int32_t router_size;
  // the maximum numbers of outputs of a layer's first products, and of inputs of a product
  int32_t projection_size, mixed_size;
  int32_t num_streams;   // the streams of a token, with alternating updates or hyper-connections; otherwise 0
  int32_t input_size;    // the inputs of this stage's layers and of those behind it; 0 without
  int32_t is_latent;     // attention is latent, with the sizes that operations have
  int32_t index_dim;     // the elements of an index key; 0 without an indexer
  int32_t index_inputs;  // the numbers that are stored behind an index key, if keys are chosen in groups; or 0
  float index_eps;       // the epsilon of the norm of index keys in latent attention
  // Not 0 if attention is compressed: keys are also values, the last elements of heads are rotated in pairs of
  // neighbors, and index keys are stored with entries.
  int32_t is_compressed;
  int32_t num_threads;

  int streams_size() const { return num_streams * hidden_size; }
};

// The operations, which act on each row of the slice. If an operation has a norm, vectors[0] is its weight and
// vectors[1] its bias, if it has one. With several ranks, `part` is this rank's part of a sum over the ranks.
enum class OpKind : int32_t {
  embed = 0,         // residual = scale * the token's row of parts[0], or of hidden if there are no parts, + the row of
                     // parts[1] at its position if there is one, + row 0 of parts[2] if there is one; fills the rotary
                     // tables. With several ranks: part = the token's row if this rank has it, else 0; residual = the
                     // rest
  quantize = 1,      // activations[0] = residual, normed if there is a norm, times the norm's gate if it has one. With
                     // vectors[2], the weights of a layer norm, then its biases, that is normed again, with the epsilon
                     // of index keys
  linear = 2,        // target = activations[source] * parts + vectors
  gated_linear = 3,  // activations[1] = activation(scale * gate) * up; parts and vectors are those of gate and up, or
                     // only of the gate. With vectors[2], a Xielu, that is the activation
  rotate_store = 4,  // norms and rotates queries and keys; stores queries for the next attention, keys and values.
                     // vectors[2] is a QueryScaling, or null. The projection has queries and `num_stored` of keys and
                     // values: if it has only keys, values are those before their norm. If the attention
                     // `reads_source`, only stores queries. Unless `scale` is 0, limits all three to +-scale. In latent
                     // attention, the last `num_columns` elements of queries and keys are rotated ones, and zeros
                     // replace those that the layer lacks; without vectors[0] the key is already normed and rotated
  attention = 5,     // activations[1] = attention, times activated gates in the projection if `first_column` is set.
                     // Compressed attention rotates it back.
                     // vectors[0] are sinks, or null; vectors[1] are DistanceBiases with `num_columns` as zero, or
                     // null. If it `norms_values`, each head's output is normed before that
  norm_add = 6,  // residual += scale * block, normed if there is a norm. If it `reads_source`, only of tokens with one
  gated_norm_add = 54,  // residual = residual * vectors[2] + block * vectors[1], normed by vectors[0]; vectors[1] may
                        // be null
  final_norm = 7,       // hidden = residual, normed if there is a norm
  head = 8,             // logits of the rows asked for, with the bias vectors[0] or null; always the last operation
  sum = 9,  // target = the parts of all ranks, added in their order, + vectors[0] if there is one; of `num_columns`
            // elements
  // The four operations of a layer with experts, in this order:
  route = 10,            // chooses the experts of each row by the router's logits
  gated_experts = 11,    // the same as gated_linear, for each row and each of its experts
  expert_outputs = 12,   // the outputs of each row's experts
  combine_experts = 13,  // target = the sum of these, each times its weight; and of `block`, if it has the output of
                         // shared experts, times the sigmoid of their gate's logit. With vectors[0], each expert's
                         // output is first multiplied by that, then normed. The output of an expert without matrices
                         // is the residual, normed by vectors[1], with the biases vectors[2], if that is not null
  add_shortcut = 66,     // residual += scale * shortcut, to which an earlier operation wrote
  // Recurrent layers. A short convolution reads the projection and writes activations[1]. Other mixers have three
  // operations, in this order:
  short_convolution = 14,
  convolve = 15,    // convolves the inputs in the projection, and stores those that later tokens read
  scan = 16,        // the outputs, which replace inputs in the projection, and the recurrent part of the state
  gate_mixed = 17,  // activations[1] = these, normed and times the activated gate
  // Short convolutions within a layer with attention:
  average_heads = 72,    // `num_heads` queries and `num_kv_heads` keys from `first_column` of the projection on = the
                         // mean of each query and its key, and the mean of each key and the mean of its queries
  convolve_heads = 73,   // combines tokens and elements of queries and keys, in place, adds the numbers that begin at
                         // `num_columns` of the projection, and stores the inputs that later tokens read
  convolve_inside = 68,  // convolves `channels` numbers of the target, which is the projection, from `first_column` on,
                         // or the block, in place, and stores the inputs that later tokens read
  // For products in the projection:
  quantize_columns = 18,  // activations[0] = `num_columns` of the projection from `first_column` on, normed by
                          // vectors[0] if there is a norm
  norm_columns = 65,      // norms `num_columns` of the projection from `first_column` on by vectors[0]
  norm_beside = 53,       // copies `num_columns` of the projection from `first_column` on to the columns behind them,
                          // then norms the first ones by vectors[0]
  // In latent attention:
  scale_heads = 58,     // multiplies `num_heads` heads of `head_dim` elements, which begin at `first_column` of the
                        // projection, by vectors[0] * log(position + 1) + vectors[1], which have an element per head
  load_key = 59,        // before `rotate_store`: the key of the projection = the row's key in the cache of `layer`
  latent_queries = 19,  // each head's plain query times its matrix in `heads`, of which there are `num_heads`
  latent_values = 20,   // activations[0] = each head's part of activations[1] times its matrix in `heads`, times gates
                        // if there are any; in compressed attention, for groups of heads

  norm = 21,  // residual = residual, normed
  // Where ranks share a norm of a mixer, between `scan` and `gate_mixed`, whose target is `part` then:
  share_squares = 22,  // part = the sum of squares of the row's outputs

  place = 24,  // residual = the row of `encoded` in place of the token, if there is one, + parts[0] at its position
  add_placed = 25,  // residual += the same row's elements from `first_column` on

  scale = 26,       // residual *= scale
  add_normed = 27,  // residual += residual, normed
  add_blocks = 28,  // block = block, normed by vectors[0], + the first columns of the projection, normed by vectors[1]
  // An MLP whose gates and other elements are in the projection, `num_columns` of each of a rank; see SparseGates. With
  // several ranks there are two operations, of which the first writes `part` and the second has it as its target:
  share_gates = 29,
  sparse_gates = 30,  // activations[1] = activation(gates above the threshold, less that) * up; without vectors[0]
                      // there is no threshold

  // Where ranks share norms of all heads, before `rotate_store`, whose target is `part` then:
  share_head_squares = 40,  // part = the sum of squares of the row's queries, then that of its keys

  // In towers, whose outputs are hidden states after several layers:
  clamp = 41,        // `num_columns` of the target from `first_column` on, limited to vectors[0][0] to vectors[0][1].
                     // Activations must be float32
  activate = 69,     // residual = activation(block); with `num_columns`, these of the projection are activated in place
  keep_hidden = 42,  // hidden from `first_column` on = residual, or `num_columns` of the streams from `source` on

  // With an indexer:
  choose_keys = 43,  // after `rotate_store`, chooses the keys of the next operations of attention that are `is_sparse`.
                     // With `num_queries`, vectors[0] has a factor for each of them.
                     // In latent attention, vectors[1] of that operation are the weights of the norm of index keys,
                     // then its biases; null if the layer has no indexer
  summarize_group = 56,  // before `choose_keys` in latent attention, if keys are chosen in groups: if the row is the
                         // last one of its group, replaces its stored index key by that of the group. It is the sum of
                         // the tokens' index keys, each element times a softmax over the tokens of their logits plus
                         // vectors[0], which has a row for each place in the group
  store_entries = 57,  // after `rotate_store` in compressed attention: if the row is the last one of an entry, computes
                       // and stores the entry and its index key. In such layers, `rotate_store` also stores the
                       // row's inputs to entries, `num_columns` of the projection from `first_column` on, and
                       // rotates the index queries. These follow the weights of the indexer's heads, which follow
                       // the inputs
  store_index = 46,    // before `rotate_store` without latent attention: norms and rotates the index queries, which
                       // begin at `first_column`, and the index key behind them, and stores that. vectors[0] and
                       // vectors[1] are the norms of queries and key. If keys are chosen in groups, the key stays as it
                       // is, and the cosines and sines of the token may be stored behind it
  average_group = 60,  // the same as `summarize_group` without latent attention: the index key of the group is the mean
                       // of the tokens' index keys, normed by vectors[1], and rotated like the first one

  // Norms within blocks, which ranks may share. Then there is the first operation, too, and the target of the second
  // one is `part`, and `scale` times the sum of all squares is their mean:
  share_activation_squares = 67,  // part = the sum of squares of `num_columns` of activations[1]
  norm_activations = 45,          // activations[0] = `num_columns` of activations[1], which must be float32, normed by
                                  // vectors[0]

  // Inputs of layers (phases/layer_inputs.h), of `num_columns` elements each:
  embed_inputs =
      31,           // inputs = scale * the token's row of parts[0], or row 0 if it is not of the table's `num_columns`
                    // rows. With several ranks: part = the row if this rank, whose rows begin at `first_column`, has it
  add_inputs = 32,  // inputs = (scale * the projection, each layer's columns normed by vectors[0], + inputs) / sqrt(2);
                    // with `num_stored` 0, only the normed projection
  quantize_inputs = 44,  // activations[0] = the inputs from `first_column` on
  gate_by_inputs = 33,   // activations[1] = activation(projection) * the layer's inputs, which begin at `first_column`

  // Streams with alternating updates (phases/streams.h):
  expand_streams = 34,   // streams = residual, and products of it in the projection
  predict_streams = 35,  // streams = what is predicted of them; residual = the active one
  correct_streams = 36,  // streams = corrected by the error of the active one; residual = that, scaled
  add_to_streams = 37,   // streams but the first += block, normed
  load_stream = 38,      // residual = the stream that begins at `first_column`
  reduce_streams = 39,   // residual = the mean of the first stream and of products of the others in the projection

  keep_token = 23,  // inputs = the digits of the token

  // In blocks that layers share, which also read the tokens' embeddings:
  keep_inputs = 47,   // inputs from `first_column` on = residual
  join_inputs = 48,   // activations[0] = residual and inputs, side by side, normed by vectors[0]
  quantize_sum = 49,  // activations[0] = residual + block, normed by vectors[0]

  // Where a pass through layers begins that are computed several times, whose kept states are inputs:
  add_kept = 55,  // residual += scale * vectors[0], or the inputs from `first_column` on if that is null

  // For routers that pass their results on to the router of the next layer:
  chain_columns = 70,  // inputs = the first `num_columns` of the projection, + vectors[0] * inputs if that is not null;
                       // then the projection = these, normed by vectors[1]
  drop_masked = 80,    // residual = 0 for the token `source`, and / the share of others in the sequence for others
  // Where each element of the stream, and of a block's output, has a factor:
  scale_add = 71,  // residual = residual * vectors[0] + block * vectors[1] + vectors[2]; without vectors[1], no block

  // Streams with hyper-connections (phases/streams.h):
  repeat_streams = 50,  // streams = residual
  mix_streams = 51,     // residual = the sum of the streams times their factors, or their mean
  update_streams = 52,  // streams, or sums of them, += what was added to that sum since then, times their other factors
  norm_streams = 61,    // before `mix_streams` of low rank: activations[0] = streams, each normed

  // Streams with attention residuals (phases/streams.h):
  attend_streams = 74,  // residual, or `target` if that is the block, = the mean of the streams from `first_column` on
                        // by attention with the query vectors[0]; there are `num_columns` of them. If it
                        // `norms_values`, the mean is of the streams divided by their root mean squares
  add_to_stream = 75,   // the stream at `first_column` = itself * scale + what was added to that mean since then
  copy_streams = 76,    // the last `num_columns` numbers of the streams = those from `first_column` on
  join_block = 77,  // activations[0] = residual and block, side by side, each normed by vectors[0]; before that, they
                    // are in the projection from `first_column` on
  gate_block = 78,  // residual = residual * (1 - tanh(x)) + block * tanh(y), which replaces that mean; x and y are in
                    // the projection from `first_column` on

  rotate_heads = 79,  // the heads that begin at `first_column` of the projection = these, normed by vectors[0] if that
                      // is not null, * scale, rotated

  // Embeddings of n-grams (phases/ngrams.h), in this order, with products in between:
  embed_ngrams = 62,  // the first columns of the projection = the embeddings of the n-grams that end with the token,
                      // from parts[0]. With several ranks: part = these, 0 where other ranks have them
  gate_ngrams = 63,   // behind values in the projection: keys = the inputs of the convolution. streams += gated values.
                      // vectors are the norms of keys, of streams and of these inputs
  convolve_ngrams = 64,  // streams += the convolution of these, and stores those that later tokens read
};

// The place where the result of a product is written. For `residual` it is multiplied by the scale and added, for
// `added` it is added to the projection. Only `clamp` has activations[source] as its target.
enum class LinearTarget : int32_t {
  qkv = 0,
  residual = 1,
  block = 2,
  part = 3,
  router = 4,
  inputs = 5,
  activations = 6,
  added = 7,
  shortcut = 8
};
// Norms of queries and of keys: of each head, by vectors[0] for queries and vectors[1] for keys; of all heads together,
// by the same, with biases behind the weights of a layer norm; or of each head by a row of vectors[0], and of
// vectors[1] if there are biases, queries before keys. `bounded` limits each head's norm, after queries * vectors[0].
enum class QKNorm : int32_t { none = 0, head = 1, full = 2, each_head = 3, bounded = 4, full_layer = 5 };

constexpr int kMaxParts = 3;

// The change that a LoRA adapter makes to a product: up * (down * activations), separately for each part. All factors
// have the same rank, which is a multiple of kColumnTile and at most `adapter_rank`.
//
// An embedding is a product with vectors that have a single 1, which selects a row: the adapter adds up * (row of
// down).
struct Adapter {
  const PackedWeight* down;     // the factors of all parts, one after the other; null if the adapter adds nothing
  const PackedWeight* whole;    // replaces the matrix of an embedding or a head; or null
  LowRankFactor up[kMaxParts];  // have rank 0 for parts that the adapter does not change
};

// A limit of the numbers in a gated product: the gate is at most `bound`, and the other factor is in +-`bound`. The
// gate is limited before its activation, or after it. Without a limit, `bound` is 0.
struct GateLimit {
  float bound;
  int32_t is_activated;
};

// A layer's mixture of experts. This rank has experts [first, first + count), or its part of their elements; the arrays
// contain only these.
struct ExpertLayer {
  Router router;
  int32_t size;  // the size of an expert's input and output
  int32_t first, count;
  int32_t adds_block, has_shared_gate;
  int32_t scales_inputs;  // weights multiply the experts' inputs instead of their outputs; there are no biases then
  GateLimit gate_limit;
  const PackedWeight *gate, *up, *down;                // `up` is null if the MLPs have no gate
  const float *gate_biases, *up_biases, *down_biases;  // one after the other, or null
  // For each expert, the adapters' changes to its first products and to its output, by adapter number; or null.
  const Adapter *const *gated_adapters, *const *output_adapters;
};

// A factor on the queries at position p, with x = (p + offset) / length: 1 + beta * log(1 + floor(x)) if `kind` is 0,
// (1 + x) to the power of beta if it is 1, and 1 + beta * log(max(x, 1)) if it is 2.
struct QueryScaling {
  float beta, length, offset, kind;

  float factor(int position) const {
    const float x = (float(position) + offset) / length;
    if (kind == 1.0f) return std::exp(beta * std::log1p(x));
    return 1.0f + beta * (kind == 2.0f ? std::log(std::max(x, 1.0f)) : std::log1p(std::floor(x)));
  }
};

// Biases of attention scores that depend on the query, whose factors begin at `first_column` of the projection; see
// QueryBiases. They are scaled like queries. If `bound` is not 0, the factors of a head are first multiplied by
// `scales`, and their norm is limited to `bound`. `head_bound` limits those of queries and keys. If `first_sink` is not
// 0, the sinks of a token's heads begin there.
struct RelativeBiases {
  int32_t first_column, rank, num_distances, first_sink;
  float bound, head_bound;
  const float* scales;  // [heads, rank], or null
  const float* table;
};

// The choice of an indexer: of the blocks of `block_size` keys, a token attends to the `num_chosen` with the highest
// scores, including its own and those just before it, `num_local` in all. A block has the score of its best key.
//
// With `has_groups`, it chooses among the blocks that end at or before its own key, and attends to the keys behind
// them, too. Such a block is a group, and has one index key, which is stored with its last token. In compressed
// attention, a group is an entry, and there are no keys behind the last one.
//
// Without latent attention, each key/value head has an index query and a choice. With `num_queries`, a token has that
// many index queries instead, and all heads have the choice by the sum of their positive products.
struct ChoiceRule {
  int32_t num_chosen, block_size, num_local, has_groups, num_queries;

  // Returns the length of the longest sequence in which all keys are chosen.
  int num_keys() const { return num_chosen * block_size + (has_groups ? block_size - 1 : 0); }
  // Returns the number of blocks among which the token at a position chooses.
  int num_candidates(int position) const {
    return has_groups ? (position + 1) / block_size : position / block_size + 1;
  }
};

// The entries of a layer with compressed attention: keys that summarize the last `span` tokens, one for every `rate`
// tokens, to which later tokens attend. See workers/layers/compressed_spec.py.
//
// The inputs of a token follow the keys of its block: those to the entry, then those to its index key. Each of both are
// values, then as many logits. If entries overlap, the first half of these is for the next entry.
struct Compression {
  int32_t rate, overlaps;
  int32_t layer, group;                    // the cache of the entries
  int32_t index_dim, index_heads;          // the sizes of the indexer, or 0 without one
  const float *biases, *norm;              // the biases of logits [span, head_dim], and the norm of the entry
  const float *index_biases, *index_norm;  // the same for its index key, or null

  int span() const { return rate * (1 + overlaps); }
  // Returns the number of a token's inputs to `size` elements.
  int num_inputs(int size) const { return 2 * size * (1 + overlaps); }
};

// Only an MLP's gates above their mean plus `deviations` standard deviations are used, reduced by that threshold; the
// others are 0. `count` is the number of elements of all ranks.
struct SparseGates {
  float deviations, count;
};

// The weights of alternating updates in one layer (arXiv 2301.13310), of N streams of D elements.
struct AltUp {
  int32_t active;
  const float* router_norm;   // [D]
  const float* router;        // [N, D]
  const float* predict;       // [N * N, N]
  const float* correct;       // [N, N]
  const float* output_scale;  // [D], or null
};

// The connection of a block to N streams of D elements (hyper-connections, arXiv 2409.19606), or the sum of the streams
// after the last layer, which has only the first of the two factors for each stream. Without factors, that sum is the
// mean. With `num_iterations`, each stream is replaced by a sum of all streams (arXiv 2512.24880); see
// workers/layers/specs/hyper.py. The logits of these sums' factors, [N, N], follow those of the other factors.
//
// A connection of low rank has a `norm` of each stream. The block reads the mean of the normed streams, each element
// times the sigmoid of a number in the projection. `weight` gives the logits of the outputs' factors, if there are any.
struct HyperConnection {
  int32_t num_factors, num_iterations;
  float eps, output_scale, norm_eps;
  const float* weight;  // [num_logits, N * D]
  const float* bias;    // [num_logits]
  const float* scale;   // [num_factors + 1]; the last one is for the factors of sums
  const float* norm;    // [N, D], or null

  int num_logits(int num_streams) const {
    return num_factors * num_streams + (num_iterations ? num_streams * num_streams : 0);
  }
};

// The embeddings of n-grams in a layer, which hashes of the last tokens choose: `num_heads` for each length from 2 to
// `longest`, of all ranks. A head begins at row `first_rows[head]` of the table and has `sizes[head]` rows. No n-gram
// extends across `end_id`. This rank's part of the table begins at row `first_row`.
struct NgramTable {
  int32_t longest, num_heads, end_id;
  int64_t first_row;
  const int64_t* multipliers;         // [longest], of a token and of those before it
  const int64_t *sizes, *first_rows;  // [(longest - 1) * num_heads]
};

// The gate of a norm: the normed row x of D elements is multiplied by the sigmoid of up * silu(down * x).
struct NormGate {
  int32_t rank;
  const float* down;  // [rank, D]
  const float* up;    // [rank, D], transposed
};

struct Op {
  OpKind kind;
  ActivationKind input_kind;       // the kind of the activations that it reads
  ActivationKind activation_kind;  // the kind of the activations that it writes
  int32_t source;
  LinearTarget target;
  int32_t layer, group;  // the layer of this shard, and the group of the KV cache
  int32_t rope;          // the number of a rotary embedding, or -1
  QKNorm qk_norm;
  int32_t rotates_before_norm;
  int32_t is_optional;   // whether it is skipped in steps in which no sequence has an encoder's outputs to read
  int32_t reads_source;  // attention: whether its keys come from an encoder's outputs, which other steps store
  int32_t is_sparse;     // attention: whether tokens attend only to the keys that they last chose
  int32_t num_heads, num_kv_heads, head_dim;  // the sizes of attention
  int32_t output_dim;                         // the first elements of a value, which attention writes; or 0 for all
  int32_t num_stored;    // 2: keys and values, 1: keys, 0: nothing, the cache of another layer is read
  int32_t norms_values;  // of keys and values, or of attention's outputs; without weights
  int32_t num_parts;
  int32_t first_column;  // the first column of a product in its target, or of attention's gates in the projection; or 0
  int32_t num_columns;
  int32_t adapter_rank;
  float scale, eps;
  Activation activation;  // in activate
  GateLimit gate_limit;   // in gated_linear
  ChoiceRule choice;      // in choose_keys
  AttentionLayer attention;
  const PackedWeight* parts[kMaxParts];  // side by side
  const float* vectors[kMaxParts];       // one for each part, or null
  const ExpertLayer* experts;
  const Mixer* mixer;
  const PackedWeight* heads;  // a matrix for each query head
  const Adapter* adapters;    // the adapters by number, or null
  const AltUp* altup;
  const HyperConnection* hyper;
  const NormGate* norm_gate;
  const Compression* compression;         // of a layer with entries; or null
  const LatentShape* latent;              // of a layer with latent attention; or null
  const NgramTable* ngrams;               // of a layer with embeddings of n-grams; or null
  const RelativeBiases* relative_biases;  // of attention, and of `rotate_store` before it; or null
};

struct Model {
  explicit Model(const ModelShape& shape);

  // The number of heads that share a key/value head, in a layer and at most.
  int heads_per_kv_head(const Op& op) const { return op.num_heads / op.num_kv_heads; }
  int most_heads_per_kv_head() const { return shape.num_heads / shape.num_kv_heads; }
  KVLayout kv(const Op& op) const {
    KVLayout layout = kv_layout(op.num_kv_heads, op.head_dim);
    if (!op.latent) return layout;
    layout.value_dim = op.latent->kv_rank;
    layout.index_dim = op.latent->index_dim;
    layout.index_inputs = op.latent->index_inputs;
    return layout;
  }
  KVLayout kv_layout(int num_kv_heads, int head_dim) const {
    return {shape.kv_format,
            num_kv_heads,
            head_dim,
            shape.block_size,
            head_dim,
            !shape.is_latent && !shape.is_compressed,
            size_t(shape.block_bytes),
            shape.is_compressed ? 0 : shape.index_dim,
            shape.index_inputs};
  }
  size_t index_of(const Op& op) const { return size_t(&op - ops.data()); }
  // out = x after a norm, [hidden_size]; `out` may be `x`. By default, it is the operation's.
  void norm(const float* weight, const float* bias, float eps, const float* x, float* out) const;
  void norm(const Op& op, const float* x, float* out) const { norm(op.vectors[0], op.vectors[1], op.eps, x, out); }

  const ModelShape shape;
  const KVLayout largest_kv;  // the layout for the layer with the largest heads
  const AttentionKernels& attention;
  const RowKernels& rows;
  std::vector<Op> ops;
};

}  // namespace engine
