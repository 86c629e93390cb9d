// Embeddings of n-grams of tokens (Qwen4), which a layer adds to all streams of a token. A convolution over them
// follows, which is part of the mixers.
#pragma once

#include "model/model.h"
#include "model/ranks.h"
#include "model/rows.h"
#include "model/step.h"
#include "phases/layer_inputs.h"
#include "phases/mixers/mixers.h"

namespace engine {

class Ngrams {
 public:
  Ngrams(const Model& model, const Ranks& ranks, const Slice& slice, const LayerInputs& inputs, const Mixers& mixers)
      : model_(model), ranks_(ranks), slice_(slice), inputs_(inputs), mixers_(mixers) {}

  // Writes the embeddings of the n-grams that end with a row's token.
  void embed(const Op& op, const Rows& rows, int row) const;
  // Gates the values by the streams, adds them to these, and writes the inputs of the convolution.
  void gate(const Op& op, const Rows& rows, int row) const;

 private:
  // Returns the token that is `distance` before a row's, or -1 if there is none.
  int32_t token_before(const Op& op, int row, int distance) const;

  const Model& model_;
  const Ranks& ranks_;
  const Slice& slice_;
  const LayerInputs& inputs_;
  const Mixers& mixers_;
};

}  // namespace engine
