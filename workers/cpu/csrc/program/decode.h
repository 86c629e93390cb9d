// A step in which all requests decode: it is built from the worker's state, and its results are written back to it.
#pragma once

#include <vector>

#include "model/model.h"
#include "model/step.h"
#include "runtime/buffer.h"

namespace engine {

class DecodeLayout {
 public:
  explicit DecodeLayout(const ModelShape& shape) : shape_(shape) {}

  // Creates a row for the last token of each request and one for each of its drafts. Returns false if a slot has no
  // room, or a token is not in the vocabulary.
  bool lay_out(const DecodeBatch& batch);
  // Returns the step that computes these rows: up to their tokens, or up to their logits if the batch chooses later.
  Step step(const DecodeBatch& batch);
  // Returns the step that chooses tokens from logits of these rows.
  Step choice(const DecodeBatch& batch, float* logits);
  // Appends the sampled tokens to the requests, and looks up drafts for the next step. Returns how many accepted tokens
  // could not be sampled; token 0 is appended in their place.
  int advance(const DecodeBatch& batch) const;

 private:
  // The arrays with one number per row that are stored one after the other in `arrays_`, before the slot mapping of
  // each group.
  enum Array { kInputIds, kPositions, kNextPositions, kLogitRows, kAdapters, kNumArrays };

  int num_rows() const { return starts_.back(); }
  int32_t* array(int index) { return arrays_.data() + size_t(index) * num_rows(); }
  const int32_t* array(int index) const { return arrays_.data() + size_t(index) * num_rows(); }
  const SamplingRows* rows_to_sample(const DecodeBatch& batch);

  const ModelShape& shape_;
  std::vector<int32_t> starts_;  // the first row of each request, and the end of the last
  std::vector<int64_t> slots_;   // the slot of each row
  std::vector<int32_t> arrays_;
  std::vector<int32_t> rotary_;  // three positions of each row, or empty
  std::vector<StepGroup> groups_;
  bool has_adapters_ = false;
  SamplingRows sampling_{};
  Buffer hidden_;
};

}  // namespace engine
