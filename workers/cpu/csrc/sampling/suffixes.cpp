#include "sampling/suffixes.h"

#include <algorithm>
#include <array>
#include <limits>

namespace engine {

namespace {

// The maximum number of places of a chain that are examined, and of passages that are compared.
constexpr int kMaxVisited = 128, kMaxPassages = 32;
// Among passages that match for at least this many tokens, none is better than another.
constexpr int32_t kLongMatch = 16;
// A passage is a source if it matched for this many tokens. A request that differs from its source for at most
// kLongestEdit tokens probably continues with it.
constexpr int32_t kSourceMatch = 6, kLongestEdit = 12;
constexpr int32_t kMostAfterEdit = 2;

uint32_t bucket_of(const int32_t* context, int32_t length, int32_t num_buckets) {
  uint32_t hash = 2166136261u;
  for (int32_t i = 0; i < length; i++) hash = (hash ^ uint32_t(context[i])) * 2654435761u;
  return (hash ^ (hash >> 15)) & uint32_t(num_buckets - 1);
}

// An earlier occurrence of a request's last tokens, whose following tokens can be drafts.
struct Passage {
  const int32_t* tokens;
  int64_t mask, place, end;
  int32_t length;  // how many tokens before it match

  // Returns the k-th token that followed, or -1.
  int32_t next(int32_t k) const { return place + k < end ? tokens[(place + k) & mask] : -1; }
};

struct Passages {
  std::array<Passage, kMaxPassages> found;
  int count = 0;

  bool is_full() const { return count == kMaxPassages; }
  void add(const Passage& passage) { found[count++] = passage; }
  template <class Keeps>
  void keep(Keeps keeps) {
    count = int(
        std::remove_if(found.begin(), found.begin() + count, [&](const Passage& passage) { return !keeps(passage); }) -
        found.begin());
  }
};

void index_tokens(Suffixes& suffixes, int64_t slot, int64_t max_model_len, const int32_t* tokens, int32_t length) {
  const int32_t context = suffixes.context_length;
  int32_t* heads = suffixes.heads + slot * suffixes.num_buckets;
  int32_t* previous = suffixes.previous + slot * max_model_len;
  for (int32_t place = std::max(suffixes.num_indexed[slot], context); place < length; place++) {
    int32_t& head = heads[bucket_of(tokens + place - context, context, suffixes.num_buckets)];
    previous[place] = head;
    head = place;
  }
  suffixes.num_indexed[slot] = std::max(suffixes.num_indexed[slot], length);
}

int32_t match_length(const int32_t* passage, int64_t mask, int64_t place, int64_t begin, const int32_t* tokens,
                     int32_t length, int32_t longest) {
  const int32_t most = int32_t(std::min<int64_t>({place - begin, length, longest}));
  int32_t matched = 0;
  while (matched < most && passage[(place - 1 - matched) & mask] == tokens[length - 1 - matched]) matched++;
  return matched;
}

void find_in_own(const Suffixes& suffixes, int64_t slot, int64_t max_model_len, const int32_t* tokens, int32_t length,
                 Passages& passages) {
  const int32_t context = suffixes.context_length;
  const int32_t* previous = suffixes.previous + slot * max_model_len;
  int32_t place =
      suffixes.heads[slot * suffixes.num_buckets + bucket_of(tokens + length - context, context, suffixes.num_buckets)];
  for (int visited = 0; place && visited < kMaxVisited && !passages.is_full(); visited++, place = previous[place]) {
    const int32_t matched = match_length(tokens, -1, place, 0, tokens, length, suffixes.longest_match);
    // The source may include the drafts themselves, which are written one by one.
    if (matched >= context) passages.add({tokens, -1, place, std::numeric_limits<int64_t>::max(), matched});
  }
}

void find_in_history(const Suffixes& suffixes, const int32_t* tokens, int32_t length, Passages& passages) {
  if (!suffixes.history_size) return;
  const int32_t context = suffixes.context_length;
  const int64_t mask = suffixes.history_size - 1;
  const int64_t begin = std::max(suffixes.history_begin, suffixes.history_end - suffixes.history_size);
  int64_t place = suffixes.history_heads[bucket_of(tokens + length - context, context, suffixes.history_buckets)];
  for (int visited = 0; place >= begin + context && visited < kMaxVisited && !passages.is_full(); visited++) {
    const int32_t matched =
        match_length(suffixes.history_tokens, mask, place, begin, tokens, length, suffixes.longest_match);
    if (matched >= context) passages.add({suffixes.history_tokens, mask, place, suffixes.history_end, matched});
    place = suffixes.history_previous[place & mask];
  }
}

}  // namespace

int32_t draft_from_suffixes(Suffixes& suffixes, int64_t slot, int64_t max_model_len, int32_t* tokens, int32_t length,
                            int32_t most, int32_t longest) {
  if (length < suffixes.context_length) return 0;
  index_tokens(suffixes, slot, max_model_len, tokens, length);
  Passages passages;
  find_in_own(suffixes, slot, max_model_len, tokens, length, passages);
  find_in_history(suffixes, tokens, length, passages);
  passages.keep([&](const Passage& passage) { return passage.length > longest; });
  if (!passages.count) return 0;
  for (int i = 0; i < passages.count; i++) longest = std::max(longest, passages.found[i].length);

  int32_t& distance = suffixes.source_distance[slot];
  const bool has_source = distance && length - suffixes.source_length[slot] <= kLongestEdit;
  const auto goes_on = [&](const Passage& passage) {
    return passage.tokens == tokens && passage.place == length - distance;
  };
  const auto passages_end = passages.found.begin() + passages.count;
  if (has_source && std::any_of(passages.found.begin(), passages_end, goes_on) && longest < kLongMatch) {
    // The request copies a text and has returned to it after an edit, so it will probably continue with it.
    passages.keep(goes_on);
    longest = kLongMatch;
  } else {
    const int32_t needed = std::min(longest, kLongMatch);
    passages.keep([&](const Passage& passage) { return passage.length >= needed; });
  }
  const Passage& first = passages.found[0];
  if (longest >= kSourceMatch && first.tokens == tokens) {
    distance = int32_t(length - first.place);
    suffixes.source_length[slot] = length;
  }
  most = std::min(most, std::max(1, int32_t(suffixes.drafts_per_match * longest)));
  float share = 1;
  int32_t count = 0;
  for (; count < most; count++) {
    // Choose the token that followed most passages; of equally frequent ones, the one after the last passage.
    int32_t best = -1;
    int best_votes = 0, votes_in_all = 0;
    for (int i = 0; i < passages.count; i++) {
      const int32_t token = passages.found[i].next(count);
      if (token < 0) continue;
      votes_in_all++;
      if (token == best) continue;
      const auto agrees = [&](const Passage& passage) { return passage.next(count) == token; };
      const int votes = int(std::count_if(passages.found.begin(), passages.found.begin() + passages.count, agrees));
      if (votes > best_votes) best = token, best_votes = votes;
    }
    if (!votes_in_all) break;
    share *= float(best_votes) / float(votes_in_all);
    if (share < suffixes.least_share) break;
    tokens[length + count] = best;
    passages.keep([&](const Passage& passage) { return passage.next(count) == best; });
  }
  return count;
}

int32_t draft_after_edit(const Suffixes& suffixes, int64_t slot, int32_t* tokens, int32_t length, int32_t most) {
  const int32_t distance = suffixes.source_distance[slot];
  if (!distance || length - suffixes.source_length[slot] > kLongestEdit) return 0;
  const int32_t count = std::min(most, kMostAfterEdit);
  for (int32_t k = 0; k < count; k++) tokens[length + k] = tokens[length + k - distance];
  return count;
}

void remember_answer(Suffixes& suffixes, const int32_t* tokens, int32_t count) {
  if (!suffixes.history_size) return;
  const int32_t context = suffixes.context_length;
  const int64_t mask = suffixes.history_size - 1;
  const int32_t skipped = int32_t(std::max<int64_t>(count - suffixes.history_size / 2, 0));
  for (int32_t i = skipped; i <= count; i++) {
    const int64_t place = suffixes.history_end++;
    suffixes.history_tokens[place & mask] = i < count ? tokens[i] : -1;
    if (i - skipped < context || i == count) {
      suffixes.history_previous[place & mask] = 0;
      continue;
    }
    int64_t& head = suffixes.history_heads[bucket_of(tokens + i - context, context, suffixes.history_buckets)];
    suffixes.history_previous[place & mask] = head;
    head = place;
  }
}

}  // namespace engine
