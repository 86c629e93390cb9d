// Alternating updates (arXiv 2301.13310): a token has several hidden states, called streams.
//
// A layer predicts all of them, computes only the active one, and corrects all by the prediction error. All functions
// work on one row. A product of streams, which is in the projection, is scaled to the magnitude of the first stream.
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

 private:
  // Scales product number `index` in the projection to the magnitude of the first stream, and returns it.
  float* scaled_product(const Rows& rows, int row, int index) const;
  // Writes the inputs, one per stream, of the products that compute the streams' factors.
  void modalities(const Op& op, const float* x, const Rows& rows, int row, float* out) const;

  const Model& model_;
};

}  // namespace engine
