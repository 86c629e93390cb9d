// The end of a step: the logits of the requested rows, and the choice of their tokens.
#pragma once

#include <vector>

#include "model/model.h"
#include "phases/products.h"
#include "model/ranks.h"
#include "phases/scratch.h"
#include "model/step.h"
#include "runtime/buffer.h"
#include "runtime/threads.h"

namespace engine {

class Head {
 public:
  Head(const Model& model, Products& products, Ranks& ranks) : model_(model), products_(products), ranks_(ranks) {}

  // Makes room for the rows of a step. If the step samples and has no memory for logits, sets it to a buffer.
  void begin_step(Step& step);
  float* logits() const { return logits_.floats(); }

  // Begins the product of hidden rows and the output projection. Returns the number of its tiles.
  int begin_product(const Step& step);
  void run_product(const Step& step, Tile& tile, Scratch& scratch);

  // Begins the choice of tokens from the logits. Returns the number of its tiles, one for each row to sample.
  int begin_choice(const Step& step);
  void choose(const Step& step, Tile& tile, Scratch& scratch);

 private:
  // The largest logit of a tile's row, and its token. For a NaN, the token is negative.
  struct Best {
    float logit;
    int32_t token;
  };
  // Returns the better of two neighbors, the first one if they are equal.
  static Best likelier(const Best& first, const Best& second) {
    return first.token >= 0 && (second.token < 0 || second.logit > first.logit) ? second : first;
  }

  float* logit_maxima(int row) const {
    return logit_maxima_.floats() + size_t(row) * logit_blocks(model_.shape.vocab_size);
  }
  // Returns the adapter of a row, or null.
  const Adapter* adapter_of(const Step& step, int row) const;
  // Calls run(adapter, first, count) for each run of consecutive rows in [first, end) that have the same adapter.
  template <class Run>
  void for_adapters(const Step& step, int first, int end, Run run) const;
  float* low_rank(int row) const { return low_rank_.floats() + size_t(row) * model_.ops.back().adapter_rank; }
  Best* bests() const { return reinterpret_cast<Best*>(best_.bytes()); }
  Best most_likely(int row) const;
  void take_most_likely(const Step& step);
  void gather_logits(const Step& step);
  void exchange_winners(int rows);

  const Model& model_;
  Products& products_;
  Ranks& ranks_;
  Buffer activations_;
  Buffer low_rank_;  // the products of each row with first factors, by which adapters' second factors are multiplied
  Buffer logits_;    // the logits of all rows, if the step has no memory for them
  Buffer logit_maxima_;        // the maximums of the blocks of each sampled row
  Buffer own_logits_;          // the logits of this rank's share of the vocabulary
  Buffer best_;                // the best token of each row and tile, if the most likely tokens are chosen
  std::vector<Best> winners_;  // the best token of each row
};

}  // namespace engine
