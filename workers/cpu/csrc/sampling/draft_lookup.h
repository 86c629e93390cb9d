// Drafts by lookup: the tokens that a request's grammar forces, or else the tokens that followed an earlier occurrence
// of the request's last tokens, in its prompt, in its output, or in the output that its client predicted.
#pragma once

#include <cstdint>

namespace engine {

// The requests of a step share kMaxDraftsOfStep drafts equally, so that no request waits long for the drafts of others.
// If a request's share is less than kLeastShare, there are no drafts: with so many requests, verifying a draft takes
// about as long as the part of a step that it may save.
constexpr int32_t kMaxDraftsOfStep = 16, kLeastShare = 4;
// For every kRequestsOfMatchedToken further requests, one more token must match. A step of one request waits for
// weights and has time for drafts. The more requests it has, the more time a draft takes, so the likelier it must be
// right.
constexpr int32_t kRequestsOfMatchedToken = 2;
// Longer matches count as matches of this length.
constexpr int32_t kLongestMatch = 64;
// A step may have more forced drafts, because they are nearly always right. A right draft yields a token like any other
// row.
constexpr int32_t kMaxForcedOfStep = 32;

// The drafts of every slot, and those that were found last.
struct DraftLookup {
  int32_t* num_drafts;           // [slots]; drafts follow each slot's tokens
  int32_t most, shortest_match;  // drafts of a slot, and tokens that must match, in a step of one request
  int32_t num_found;
  int32_t forced_width;
  int32_t* num_forced;                     // [slots], tokens expected to follow the first `forced_start` ones
  const int32_t* forced_start;             // [slots]
  const int32_t* forced_tokens;            // [slots, forced_width]
  const int32_t* const* predicted_tokens;  // [slots], each client's prediction of the output
  const int32_t* num_predicted;            // [slots], 0 for requests without a prediction
  const int32_t* num_prompt_tokens;        // [slots]
  int32_t* num_from_prediction;            // [slots], how many of the drafts are from the prediction
  int32_t* found_slots;                    // [num_found], those with drafts
  int32_t* found_counts;                   // [num_found]
  int32_t* found_tokens;                   // of all found slots, one after the other
};

// Looks for drafts of the slots that have a new token. A slot gets as many drafts as tokens matched, because a request
// that has copied for longer is more likely to go on. Of matches of the same length, one in the prediction counts
// first, and there the one nearest to the place that the output has reached. Otherwise the last match counts.
void look_up_drafts(DraftLookup& lookup, const int64_t* slots, int32_t num_slots,
                    int64_t max_model_len, int32_t* token_ids, const int32_t* num_tokens);

}  // namespace engine
