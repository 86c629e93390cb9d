// Several hidden states of a token, called streams. All functions work on one row.
//
// With alternating updates (arXiv 2301.13310), a layer predicts all of them, computes only the active one, and corrects
// all by the prediction error. A product of streams, which is in the projection, is scaled to the magnitude of the
// first stream.
//
// With hyper-connections (arXiv 2409.19606), a block reads a sum of the streams times one factor each, and its output
// times another factor is added to each stream. Factors are sigmoids of products of all streams. Each stream may first
// be replaced by a sum of all streams (arXiv 2512.24880).
//
// With hyper-connections of low rank, a block reads the mean of the normed streams, each element times its own factor.
// Products of the normed streams, of which the first has few outputs, give the factors.
//
// With attention residuals (arXiv 2607.24653), a block reads a mean of the first streams, whose factors are a softmax
// of the products of a query with the normed streams. Its output is added to one stream. The last streams may be copies
// of others, from which a message is computed in the same way, and combined with such a mean.
#pragma once

#include "model/model.h"
#include "model/rows.h"

namespace engine {

class Streams {
 public:
  explicit Streams(const Model& model) : model_(model) {}

  // Computes the streams from the residual stream and its products.
  void expand(const Rows& rows, int row) const;
  // Replaces the streams by a layer's prediction of them, and the residual stream by the active one.
  void predict(const Op& op, const Rows& rows, int row) const;
  // Corrects the streams by the error of the active one, given its computed value in the residual stream. Replaces the
  // residual stream by the corrected active one, times the layer's scale if it has one.
  void correct(const Op& op, const Rows& rows, int row) const;
  // Adds a block, normed, to all streams except the first.
  void add_block(const Op& op, const Rows& rows, int row) const;
  // Replaces the residual stream by one of the streams.
  void load(const Op& op, const Rows& rows, int row) const;
  // Replaces the residual stream by the mean of the first stream and the products of the others.
  void reduce(const Rows& rows, int row) const;

  // Sets all streams to the residual stream.
  void repeat(const Rows& rows, int row) const;
  // Quantizes the streams, each normed, for the products of low rank.
  void norm(const Op& op, const Rows& rows, int row) const;
  // Replaces the residual stream by the sum of the streams times their first factors.
  void mix(const Op& op, const Rows& rows, int row) const;
  // Adds what a block has added to that sum, times the second factors, to the streams.
  void update(const Op& op, const Rows& rows, int row) const;

  // Replaces the residual stream by a mean of some streams, which the row keeps, or the block by such a mean.
  void attend(const Op& op, const Rows& rows, int row) const;
  // Adds what a block has added to that mean to one stream.
  void add_to_one(const Op& op, const Rows& rows, int row) const;
  // Replaces the last streams by copies of others.
  void copy(const Op& op, const Rows& rows, int row) const;
  // Quantizes the residual stream and the block, each normed, side by side.
  void join_block(const Op& op, const Rows& rows, int row) const;
  // Replaces the residual stream by its sum with the block, each element times a factor. The row keeps the sum.
  void gate_block(const Op& op, const Rows& rows, int row) const;

  // Returns how many numbers a row keeps between `mix` and `update`, or between `attend` and `add_to_one`.
  size_t kept_size(const Op& op) const {
    if (op.kind == OpKind::attend_streams) return model_.shape.hidden_size + 2 * op.num_columns;
    return op.hyper && op.hyper->norm ? model_.shape.hidden_size + model_.shape.num_streams : 0;
  }

 private:
  // Norms a stream of a row.
  void norm_stream(const HyperConnection& hyper, const Rows& rows, int row, int stream, float* out) const;
  // `mix` and `update` of low rank. The row keeps the mean, and behind it the factors of the output.
  void mix_normed(const HyperConnection& hyper, const Rows& rows, int row) const;
  void add_output(const Rows& rows, int row) const;

  // Writes the sum of the streams times their first factors, or their mean. Returns the factors, and behind them the
  // logits of the factors of sums. They are in the projection.
  float* sum(const HyperConnection& hyper, const Rows& rows, int row, float* out) const;

  // Replaces each stream by the sum of all streams, given the logits of their factors, which are replaced by these.
  void mix_all(const HyperConnection& hyper, const Rows& rows, int row, float* logits) const;

  // Scales product number `index` in the projection to the magnitude of the first stream, and returns it.
  float* scaled_product(const Rows& rows, int row, int index) const;
  // Writes the inputs, one per stream, of the products that compute the streams' factors.
  void modalities(const Op& op, const float* x, const Rows& rows, int row, float* out) const;

  const Model& model_;
};

}  // namespace engine
