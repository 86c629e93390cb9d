// Drafts by lookup: what a request's grammar leaves no choice about, or else what followed where its last tokens came
// before, in its prompt, in what it generated, or in what its client predicted that it generates.
#pragma once

#include <cstdint>

namespace engine {

// The requests of a step share so many drafts equally, so that no request waits long for the drafts of others. With
// less than `kLeastShare` each they have none: among so many requests verifying a draft takes about as long as the part
// of a step that it may save.
constexpr int32_t kMaxDraftsOfStep = 16, kLeastShare = 4;
// For so many requests more one token more has to match. A step of one request waits for weights and has time for
// drafts; the more requests it has the more of its time a draft takes, so the likelier it must be right.
constexpr int32_t kRequestsOfMatchedToken = 2;
// Longer matches are not told apart.
constexpr int32_t kLongestMatch = 64;
// There may be more forced drafts in a step: they are nearly always right, and then a row gives as much as any other.
constexpr int32_t kMaxForcedOfStep = 32;

// The drafts of every slot, and what was found last.
struct DraftLookup {
  int32_t* num_drafts;           // [slots], which lie behind each slot's tokens
  int32_t most, shortest_match;  // of a slot, in a step of a single request
  int32_t num_found;
  int32_t forced_width;
  int32_t* num_forced;           // [slots], tokens expected to follow the first `forced_start` ones
  const int32_t* forced_start;   // [slots]
  const int32_t* forced_tokens;  // [slots, forced_width]
  const int32_t* const* predicted_tokens;  // [slots], each client's prediction of the output
  const int32_t* num_predicted;            // [slots], 0 for requests without a prediction
  const int32_t* num_prompt_tokens;        // [slots]
  int32_t* num_from_prediction;            // [slots], how many of the drafts are from the prediction
  int32_t* found_slots;   // [num_found], those with drafts
  int32_t* found_counts;  // [num_found]
  int32_t* found_tokens;  // of all found slots, one after the other
};

// Looks for drafts of the slots that have a new token. A slot has as many as tokens matched before them: the longer a
// request has copied, the surer it is to go on. Of matches of the same length one in the prediction counts, there the
// one nearest to the place that the output has reached, and else the last one.
void look_up_drafts(DraftLookup& lookup, const int64_t* slots, int32_t num_slots,
                    int64_t max_model_len, int32_t* token_ids, const int32_t* num_tokens);

}  // namespace engine
