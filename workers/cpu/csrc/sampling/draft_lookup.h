// Drafts by lookup: the tokens that a request's grammar forces, or else the tokens that followed an earlier occurrence
// of the request's last tokens, in its prompt, its output, or the output that its client predicted.
#pragma once

#include <cstdint>

#include "sampling/suffixes.h"

namespace engine {

// Longer matches count as matches of this length.
constexpr int32_t kLongestMatch = 64;
// The maximum number of forced drafts in a step. It is higher than for others, because forced drafts are nearly always
// accepted, and an accepted draft yields a token like any other row.
constexpr int32_t kMaxForcedOfStep = 32;

// The drafts of every slot, and the drafts that were found last.
struct DraftLookup {
  int32_t* num_drafts;           // [slots]; drafts follow each slot's tokens
  const int32_t* limits;         // [slots], the maximum number of drafts of each slot, without forced drafts
  Suffixes* suffixes;            // null to use only the last of the longest matches
  int32_t most, shortest_match;  // the maximum drafts of a slot, and the minimum matching tokens
  int32_t is_searching;          // 0 if only forced tokens are drafted here
  int32_t num_found;
  int32_t forced_width;
  int32_t* num_forced;                     // [slots], tokens expected to follow the first `forced_start` ones
  const int32_t* forced_start;             // [slots]
  const int32_t* forced_tokens;            // [slots, forced_width]
  const int32_t* const* predicted_tokens;  // [slots], each client's prediction of the output
  const int32_t* num_predicted;            // [slots], 0 for requests without a prediction
  const int32_t* num_prompt_tokens;        // [slots]
  int32_t* num_from_prediction;            // [slots], the number of drafts from the prediction
  int32_t* found_slots;                    // [num_found], the slots with drafts
  int32_t* found_counts;                   // [num_found]
  int32_t* found_tokens;                   // the tokens of all found slots, one after the other
};

// Looks up drafts for the slots that have a new token. A slot gets as many drafts as tokens matched, because a request
// that has copied for longer is more likely to continue. Of matches with the same length, one in the prediction comes
// first, and there the one nearest to the place that the output has reached. Otherwise the last match is used or, with
// `suffixes`, the majority.
void look_up_drafts(DraftLookup& lookup, const int64_t* slots, int32_t num_slots, int64_t max_model_len,
                    int32_t* token_ids, const int32_t* num_tokens);

}  // namespace engine
