#include "sampling/draft_lookup.h"

#include <algorithm>
#include <cstdlib>

namespace engine {

namespace {

// Returns how many tokens before `end` of a passage equal the tokens at the end of the request.
int32_t match_length(const int32_t* passage, int32_t end, const int32_t* tokens, int32_t length) {
  const int32_t most = std::min({end, length, kLongestMatch});
  int32_t matched = 0;
  while (matched < most && passage[end - 1 - matched] == tokens[length - 1 - matched]) matched++;
  return matched;
}

// An occurrence of a request's last tokens in a passage. `end` is 0 if there is none.
struct Match {
  int32_t length, end;
};

// Returns the longest match in the request's own tokens that is longer than `longest` tokens.
Match find_in_tokens(const int32_t* tokens, int32_t length, int32_t longest) {
  Match found{longest, 0};
  for (int32_t end = length - 1; end > found.length && found.length < kLongestMatch; end--) {
    if (tokens[end - 1] != tokens[length - 1]) continue;
    const int32_t matched = match_length(tokens, end, tokens, length);
    if (matched > found.length) found = {matched, end};
  }
  return found;
}

// Returns the longest match in the prediction that is longer than `longest` tokens. As long as the whole output equals
// the prediction, the match counts as the longest possible one, because the output follows the prompt as the prediction
// does.
Match find_in_prediction(const int32_t* predicted, int32_t num_predicted, const int32_t* tokens, int32_t length,
                         int32_t num_output, int32_t longest) {
  Match found{longest, 0};
  for (int32_t end = 1; end < num_predicted; end++) {
    if (predicted[end - 1] != tokens[length - 1]) continue;
    int32_t matched = match_length(predicted, end, tokens, length);
    if (matched == end && end == num_output) matched = kLongestMatch;
    const bool is_nearer = found.end && std::abs(end - num_output) < std::abs(found.end - num_output);
    if (matched > found.length || (matched == found.length && is_nearer)) found = {matched, end};
  }
  return found;
}

// Writes drafts after the tokens, of which there must be at least one. Returns their number.
int32_t draft(DraftLookup& lookup, int64_t slot, int64_t max_model_len, int32_t* tokens, int32_t length, int32_t most) {
  const int32_t* predicted = lookup.predicted_tokens[slot];
  const int32_t num_predicted = lookup.num_predicted[slot];
  const int32_t num_output = length - lookup.num_prompt_tokens[slot];
  const Match in_prediction =
      find_in_prediction(predicted, num_predicted, tokens, length, num_output, lookup.shortest_match - 1);
  if (lookup.suffixes) {
    const int32_t count =
        draft_from_suffixes(*lookup.suffixes, slot, max_model_len, tokens, length, most, in_prediction.length);
    if (count) return count;
    if (!in_prediction.end) return draft_after_edit(*lookup.suffixes, slot, tokens, length, most);
  }
  const Match in_tokens = lookup.suffixes ? Match{} : find_in_tokens(tokens, length, in_prediction.length);
  if (in_tokens.end) {
    const int32_t count = std::min(most, in_tokens.length);
    // Copy one by one, because the tokens to copy may include those that were just written.
    for (int32_t k = 0; k < count; k++) tokens[length + k] = tokens[in_tokens.end + k];
    return count;
  }
  if (!in_prediction.end) return 0;
  const int32_t count = std::min({most, in_prediction.length, num_predicted - in_prediction.end});
  std::copy_n(predicted + in_prediction.end, count, tokens + length);
  lookup.num_from_prediction[slot] = count;
  return count;
}

// Writes the forced tokens that follow, if the tokens sampled since then agree with the earlier forced ones. Returns
// their number.
int32_t draft_forced(DraftLookup& lookup, int64_t slot, int32_t* tokens, int32_t length, int32_t most) {
  int32_t& num_forced = lookup.num_forced[slot];
  const int32_t num_known = length - lookup.forced_start[slot];
  const int32_t* forced = lookup.forced_tokens + slot * lookup.forced_width;
  if (num_known >= num_forced || !std::equal(forced, forced + num_known, tokens + length - num_known)) {
    num_forced = 0;
    return 0;
  }
  const int32_t count = std::min(num_forced - num_known, most);
  std::copy_n(forced + num_known, count, tokens + length);
  return count;
}

}  // namespace

void look_up_drafts(DraftLookup& lookup, const int64_t* slots, int32_t num_slots, int64_t max_model_len,
                    int32_t* token_ids, const int32_t* num_tokens) {
  int32_t* found_tokens = lookup.found_tokens;
  lookup.num_found = 0;
  for (int32_t i = 0; i < num_slots; i++) {
    const int64_t slot = slots[i];
    int32_t* tokens = token_ids + slot * max_model_len;
    const int32_t length = num_tokens[slot];
    // The token that is sampled after the last draft also needs room.
    const int32_t room = int32_t(max_model_len) - 1 - length;
    const int32_t limit = lookup.is_searching ? std::min(lookup.limits[slot], room) : 0;
    const int32_t forced_limit = std::min({lookup.most, kMaxForcedOfStep / num_slots, room});
    int32_t count = 0;
    lookup.num_from_prediction[slot] = 0;
    if (lookup.num_forced[slot] && forced_limit > 0) count = draft_forced(lookup, slot, tokens, length, forced_limit);
    if (!count && length && limit > 0) count = draft(lookup, slot, max_model_len, tokens, length, limit);
    lookup.num_drafts[slot] = count;
    if (!count) continue;
    lookup.found_slots[lookup.num_found] = int32_t(slot);
    lookup.found_counts[lookup.num_found++] = count;
    found_tokens = std::copy_n(tokens + length, count, found_tokens);
  }
}

}  // namespace engine
