// Inputs of layers in addition to the hidden states: a vector for each token and layer (PLE of Gemma 3n and 4), the
// tokens' embeddings (Zamba2), the tokens (DeepSeek-V4), or the input of a drafting head's first attention.
//
// A row has the inputs of this stage's layers and of all later layers, which are passed on with the hidden states.
#pragma once

#include "model/model.h"
#include "model/ranks.h"
#include "model/rows.h"
#include "model/step.h"
#include "runtime/buffer.h"

namespace engine {

class LayerInputs {
 public:
  LayerInputs(const Model& model, const Ranks& ranks, const Slice& slice)
      : model_(model), ranks_(ranks), slice_(slice) {}

  void reserve(int rows) { inputs_.reserve(sizeof(float) * rows * model_.shape.input_size); }
  float* row(int row) const { return inputs_.floats() + size_t(row) * model_.shape.input_size; }

  // Writes the digits of the token.
  void keep_token(int row) const;
  // Writes the token's row of the table, or this rank's part of it.
  void embed(const Op& op, int row) const;
  // Adds the projection, after norming each layer's part of it.
  void add(const Op& op, const Rows& rows, int row) const;
  // Writes activations from the inputs that a product reads.
  void quantize(const Op& op, const Rows& rows, int row) const;
  // Writes activations from the residual stream and the inputs, which are normed together.
  void join(const Op& op, const Rows& rows, int row) const;
  // Adds the inputs to the first columns of the projection, passes these on, and norms them.
  void chain(const Op& op, const Rows& rows, int row) const;
  // Writes activations from the gates in the projection, multiplied by the inputs of a layer.
  void gate(const Op& op, const Rows& rows, int row) const;

 private:
  const Model& model_;
  const Ranks& ranks_;
  const Slice& slice_;
  Buffer inputs_;
};

}  // namespace engine
