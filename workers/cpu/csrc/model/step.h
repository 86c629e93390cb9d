// The input of a program in each step, and the slice of it that is computed at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sampling/draft_lookup.h"
#include "sampling/token_chooser.h"

namespace engine {

// The block table [rows, stride] and the slot of each token, in one KV-cache group.
struct StepGroup {
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* slot_mapping;
};

struct Step {
  int32_t num_tokens, num_sequences, num_logit_rows;
  int32_t wants_all_hidden;        // if false, only the rows of `logit_rows` are needed
  const int32_t* input_ids;        // [num_tokens]
  const int32_t* positions;        // [num_tokens]
  const int32_t* query_start_loc;  // [num_sequences + 1]
  const int64_t* table_rows;       // [num_sequences], rows of the block tables; null if they are in order
  const StepGroup* groups;
  uint8_t* const* kv_caches;     // the cache of each layer
  float* hidden;                 // [num_tokens], rows of hidden_size, or of what stages pass on if it is more
  int64_t hidden_stride;         // the floats from one row to the next
  const int32_t* logit_rows;     // [num_logit_rows], rows of hidden; null if `logits` are given
  float* logits;                 // [num_logit_rows, vocab_size], or null
  int32_t* tokens;               // [num_logit_rows], as TokenChooser returns them, or null
  const SamplingRows* sampling;  // null to choose the most likely tokens
  const int32_t* adapters;       // [num_tokens], the number of each token's LoRA adapter or -1; null if none has one
  const int32_t* placed;  // [num_tokens], the row of `encoded` in place of each token or -1; null if none has one
  const float* encoded;   // [rows, encoded_stride], outputs of encoders, which begin with a hidden state
  int64_t encoded_stride;
  const int32_t* rotary;   // [num_tokens, 3], positions on three axes; null if they all equal `positions`
  const int32_t* visible;  // [num_tokens][2], the first position that each token sees even outside its window,
                           // and the end of its range; null if each token sees positions up to its own. If the
                           // first is after the token, the end limits the window instead
  int32_t span_layers;     // the layers that follow `visible`, as in Python's SpanLayers: 0 for all, 1 for those with
                           // a window, 2 for those without
  const int32_t*
      source_lens;        // [num_sequences], or of the rows `table_rows`: the outputs of an encoder that each reads
  float* source_queries;  // receives the queries to sources, [layers that read them, num_tokens, query elements]; or
                          // null
};

// A batch in which every request decodes: the step computes each request's last token and its drafts, and samples one
// token after each verified draft. It reads and updates the worker's state of every slot.
struct DecodeBatch {
  int32_t num_slots, num_groups;
  int32_t chooses_later;  // `choose` chooses the tokens, once the grammar's masks are there
  const int64_t* slots;   // [num_slots]
  int64_t max_model_len;
  int32_t* token_ids;                  // [slots, max_model_len]
  int32_t* num_tokens;                 // [slots]
  int32_t* num_computed_tokens;        // [slots], one less
  const int32_t* const* block_tables;  // the table of each KV-cache group, [slots, stride of the group]
  const int64_t* block_table_strides;  // the stride of each group
  uint8_t* const* kv_caches;           // the cache of each layer
  const SamplingRows* sampling;        // without slots and positions; null to choose the most likely tokens
  const int32_t* num_drafts;           // [num_slots], how many may be verified; null for none
  DraftLookup* lookup;                 // has the drafts of this step and receives those of the next; null for none
  int32_t* tokens;          // [num_slots and drafts], as TokenChooser returns them; the accepted tokens come first
  int32_t* num_sampled;     // [num_slots], how many of these tokens a request has
  int32_t* num_verified;    // [num_slots], how many drafts were computed
  const int32_t* adapters;  // [slots], as those of a step; or null
  const int32_t* rotary_offsets;  // [slots], added to positions for embeddings with axes; null for 0
  const int32_t* source_lens;     // [slots]
  float* hidden;                  // [num_slots and drafts, hidden_stride], receives the hidden states; or null
  int64_t hidden_stride;
};

// Long steps run in slices, so that the intermediate results between two operations stay small. A slice has this many
// tokens. If sequences must not be divided, it has as many whole ones as fit in that number, but at least one.
constexpr int kSliceTokens = 512;

// The tokens of a step that pass through all layers together.
struct Slice {
  // Divides the step where no token attends to later ones; if it `keeps_sequences`, only at ends of sequences. Returns
  // the number of slices.
  int divide_step(bool keeps_sequences) {
    bounds_.assign(1, 0);
    for (int token = 1, last = 0, sequence = 0; token <= step.num_tokens; token++) {
      if (token - bounds_.back() > kSliceTokens && last > bounds_.back()) bounds_.push_back(last);
      const bool begins = token == step.query_start_loc[sequence + 1];
      sequence += begins;
      if (begins || !(keeps_sequences || sees_on(token - 1))) last = token;
    }
    bounds_.push_back(step.num_tokens);
    return step.num_tokens ? int(bounds_.size()) - 1 : 0;
  }
  // Returns the number of tokens of the longest slice.
  int most_tokens() const {
    int most = 0;
    for (size_t i = 1; i < bounds_.size(); i++) most = std::max(most, bounds_[i] - bounds_[i - 1]);
    return most;
  }

  // `index` counts from 0, and the slices of a step must begin in order.
  void begin(int index) {
    first_token = bounds_[index];
    num_tokens = bounds_[index + 1] - first_token;
    while (step.query_start_loc[first_sequence + 1] <= first_token) first_sequence++;
  }

  // Returns the range to which a token of the step attends in layers with this window, as in AttentionTask::visible.
  const int32_t* visible(int token, int window) const {
    bool follows = step.span_layers == 0 || (step.span_layers == 1) == (window != 0);
    return step.visible && follows ? step.visible + 2 * token : nullptr;
  }

  // Returns the position after a sequence's last token in the step.
  int end_position(int sequence) const { return step.positions[step.query_start_loc[sequence + 1] - 1] + 1; }

  // Returns the number of encoder outputs that the tokens of a sequence attend to. Without any, they attend to one,
  // whose effect is ignored.
  int source_len(int sequence) const { return std::max(step.source_lens[table_row(sequence)], 1); }

  // Returns the sequence of a row.
  int sequence_of(int row) const {
    const int32_t* starts = step.query_start_loc;
    const int32_t* after =
        std::upper_bound(starts + first_sequence, starts + step.num_sequences + 1, first_token + row);
    return int(after - starts) - 1;
  }

  // Returns whether a row's token has encoder outputs to read.
  bool has_source(int row) const { return step.source_lens[table_row(sequence_of(row))] > 0; }

  // Returns whether any sequence of the step has encoder outputs to read.
  bool has_any_source() const {
    for (int sequence = 0; sequence < step.num_sequences; sequence++)
      if (step.source_lens && step.source_lens[table_row(sequence)] > 0) return true;
    return false;
  }

  int64_t table_row(int sequence) const { return step.table_rows ? step.table_rows[sequence] : sequence; }

  // Returns whether the results of these rows are needed, apart from the keys and values that each layer stores.
  bool is_wanted(int first_row, int end_row) const {
    const auto is_in = [&](int row) { return first_token + first_row <= row && row < first_token + end_row; };
    return step.wants_all_hidden || std::any_of(step.logit_rows, step.logit_rows + step.num_logit_rows, is_in);
  }

  Step step{};
  int first_token = 0, num_tokens = 0;
  int first_sequence = 0;  // the first one with tokens in the slice

 private:
  // Returns whether a token of the step attends to later tokens.
  bool sees_on(int token) const { return step.visible && step.visible[2 * token + 1] > step.positions[token] + 1; }

  std::vector<int> bounds_;  // the first tokens of the slices, and the end of the last one
};

}  // namespace engine
