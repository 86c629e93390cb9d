#include "draft_lookup.h"

#include <algorithm>

#include "api.h"

namespace engine {

namespace {

// How many tokens before `end` are the same as those at the end of the request.
int32_t match_length(const int32_t* tokens, int32_t length, int32_t end) {
  const int32_t most = std::min(end, kLongestMatch);
  int32_t matched = 0;
  while (matched < most && tokens[end - 1 - matched] == tokens[length - 1 - matched]) matched++;
  return matched;
}

// Writes drafts behind the tokens, of which there are one or more, and returns how many.
int32_t draft(int32_t* tokens, int32_t length, int32_t most, int32_t shortest_match) {
  const int32_t last = tokens[length - 1];
  int32_t longest = shortest_match - 1, follows = 0;
  for (int32_t end = length - 1; end > longest && longest < kLongestMatch; end--) {
    if (tokens[end - 1] != last) continue;
    const int32_t matched = match_length(tokens, length, end);
    if (matched <= longest) continue;
    longest = matched;
    follows = end;
  }
  if (!follows) return 0;
  const int32_t count = std::min(most, longest);
  // One by one: what is copied may reach into what has just been written.
  for (int32_t k = 0; k < count; k++) tokens[length + k] = tokens[follows + k];
  return count;
}

// Writes the forced tokens that follow, if the tokens sampled since agree with those before them; returns how many.
int32_t go_on_as_forced(DraftLookup& lookup, int64_t slot, int32_t* tokens, int32_t length, int32_t most) {
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

void look_up_drafts(DraftLookup& lookup, const int64_t* slots, int32_t num_slots,
                    int64_t max_model_len, int32_t* token_ids, const int32_t* num_tokens) {
  const int32_t share = kMaxDraftsOfStep / std::max(num_slots, 1);
  const int32_t most = share < kLeastShare ? 0 : std::min(lookup.most, share);
  const int32_t shortest_match = lookup.shortest_match + num_slots / kRequestsOfMatchedToken;
  int32_t* found_tokens = lookup.found_tokens;
  lookup.num_found = 0;
  for (int32_t i = 0; i < num_slots; i++) {
    const int64_t slot = slots[i];
    int32_t* tokens = token_ids + slot * max_model_len;
    const int32_t length = num_tokens[slot];
    // The token that is sampled after the last draft needs room, too.
    const int32_t room = int32_t(max_model_len) - 1 - length;
    const int32_t limit = std::min(most, room);
    const int32_t forced_limit = std::min({lookup.most, kMaxForcedOfStep / num_slots, room});
    int32_t count = 0;
    if (lookup.num_forced[slot] && forced_limit > 0)
      count = go_on_as_forced(lookup, slot, tokens, length, forced_limit);
    if (!count && length && limit > 0) count = draft(tokens, length, limit, shortest_match);
    lookup.num_drafts[slot] = count;
    if (!count) continue;
    lookup.found_slots[lookup.num_found] = int32_t(slot);
    lookup.found_counts[lookup.num_found++] = count;
    found_tokens = std::copy_n(tokens + length, count, found_tokens);
  }
}

}  // namespace engine

ENGINE_API void engine_look_up_drafts(engine::DraftLookup* lookup, const int64_t* slots,
                                      int32_t num_slots, int64_t max_model_len, int32_t* token_ids,
                                      const int32_t* num_tokens) {
  look_up_drafts(*lookup, slots, num_slots, max_model_len, token_ids, num_tokens);
}
