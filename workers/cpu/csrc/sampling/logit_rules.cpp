#include "sampling/logit_rules.h"

#include <algorithm>
#include <cmath>

namespace engine {

namespace {

constexpr int32_t kIsPenalized = -1;

// Longer repetitions count as this many tokens.
constexpr int kMaxCompared = 64;
constexpr double kMaxPenalty = 1e30;

}  // namespace

void LogitChanger::change(const LogitRules& rules, const History& history, bool has_grammar, float* logits) {
  follow_transcript(rules, history, logits);
  if (rules.allowed) limit(rules.allowed, logits);
  forbid_ends_of(rules.bad_words, rules.bad_words_size, history, logits);
  if (history.num_tokens < rules.min_length && !(has_grammar && allows_only_ends(rules, logits)))
    for (int i = 0; i < rules.num_end_tokens; i++)
      if (is_token(rules.end_tokens[i])) logits[rules.end_tokens[i]] = -INFINITY;
  for (int i = 0; i < rules.num_biases; i++)
    if (is_token(rules.bias_tokens[i])) logits[rules.bias_tokens[i]] += rules.biases[i];
  if (rules.has_penalties) penalize(rules, history, logits);
  if (rules.dry_multiplier > 0) penalize_repetitions(rules, history, logits);
}

bool LogitChanger::allows_only_ends(const LogitRules& rules, const float* logits) const {
  const int64_t* end = rules.end_tokens + rules.num_end_tokens;
  for (int i = 0; i < vocab_size_; i++)
    if (logits[i] > -INFINITY && std::find(rules.end_tokens, end, i) == end) return false;
  return true;
}

void LogitChanger::follow_transcript(const LogitRules& rules, const History& history, float* logits) const {
  for (int i = 0; i < rules.num_suppressed; i++)
    if (is_token(rules.suppressed[i])) logits[rules.suppressed[i]] = -INFINITY;
  if (history.num_tokens == history.num_prompt_tokens)
    for (int i = 0; i < rules.num_begin_suppressed; i++)
      if (is_token(rules.begin_suppressed[i])) logits[rules.begin_suppressed[i]] = -INFINITY;
  if (rules.first_timestamp > 0) place_timestamps(rules, history, logits);
}

void LogitChanger::place_timestamps(const LogitRules& rules, const History& history, float* logits) const {
  const int first = rules.first_timestamp;
  const int32_t num_output = history.num_tokens - history.num_prompt_tokens;
  const int32_t* end = history.token_ids + history.num_tokens;
  const bool ends_in_timestamp = num_output >= 1 && end[-1] >= first;
  // A single timestamp at the beginning counts as the second of a pair.
  const bool ends_in_pair = ends_in_timestamp && (num_output < 2 || end[-2] >= first);
  forbid(first - 1, first, logits);
  if (ends_in_pair) forbid(first, vocab_size_, logits);
  if (ends_in_timestamp && !ends_in_pair) forbid(0, rules.end_token, logits);
  for (int32_t i = 1; i <= num_output; i++) {
    if (end[-i] < first) continue;
    forbid(first, int64_t(end[-i]) + (ends_in_timestamp && !ends_in_pair ? 0 : 1), logits);
    break;
  }
  if (num_output == 0) {
    forbid(0, first, logits);
    if (rules.max_initial_timestamp >= 0) forbid(int64_t(first) + rules.max_initial_timestamp + 1, vocab_size_, logits);
  }
  float text = -INFINITY, time = -INFINITY;
  for (int i = 0; i < vocab_size_; i++) (i < first ? text : time) = std::max(i < first ? text : time, logits[i]);
  if (time == -INFINITY) return;
  double sum = 0;
  for (int i = first; i < vocab_size_; i++) sum += std::exp(double(logits[i]) - double(time));
  if (double(time) + std::log(sum) > double(text)) forbid(0, first, logits);
}

// Forbids the tokens in [first, end).
void LogitChanger::forbid(int64_t first, int64_t end, float* logits) const {
  end = std::min<int64_t>(end, vocab_size_);
  if (first < end) std::fill(logits + first, logits + end, -INFINITY);
}

void LogitChanger::limit(const uint32_t* allowed, float* logits) const {
  for (int first = 0; first < vocab_size_; first += 32, allowed++) {
    const int count = std::min(32, vocab_size_ - first);
    if (*allowed == 0) {
      std::fill_n(logits + first, count, -INFINITY);
    } else if (~*allowed) {
      for (int i = 0; i < count; i++)
        if (!(*allowed >> i & 1)) logits[first + i] = -INFINITY;
    }
  }
}

// Forbids the last token of each word if the output ends with the word's other tokens.
void LogitChanger::forbid_ends_of(const int32_t* words, int size, const History& history, float* logits) const {
  const int32_t num_output = history.num_tokens - history.num_prompt_tokens;
  const int32_t* end = history.token_ids + history.num_tokens;
  for (const int32_t *word = words, *last; word < words + size; word = last + 1) {
    const int32_t num_before = *word++ - 1;
    last = word + num_before;
    if (num_before <= num_output && std::equal(word, last, end - num_before) && is_token(*last))
      logits[*last] = -INFINITY;
  }
}

void LogitChanger::penalize(const LogitRules& rules, const History& history, float* logits) {
  counts_.resize(vocab_size_);
  const int32_t* end = history.token_ids + history.num_tokens;
  for (const int32_t* token = history.token_ids + history.num_prompt_tokens; token < end; token++)
    if (is_token(*token)) counts_[*token]++;
  for (const int32_t* token = history.token_ids; token < end; token++) {
    if (!is_token(*token) || counts_[*token] == kIsPenalized) continue;
    const float count = float(counts_[*token]);
    float& x = logits[*token];
    x = x > 0 ? x / rules.repetition_penalty : x * rules.repetition_penalty;
    x -= rules.frequency_penalty * count;
    if (count > 0) x -= rules.presence_penalty;
    counts_[*token] = kIsPenalized;
  }
  for (const int32_t* token = history.token_ids; token < end; token++)
    if (is_token(*token)) counts_[*token] = 0;
}

// Penalizes tokens that would continue a repetition; see `DryParams` in protocol/sampling_params.py.
void LogitChanger::penalize_repetitions(const LogitRules& rules, const History& history, float* logits) {
  const int32_t* end = history.token_ids + history.num_tokens;
  const int32_t* begin = history.token_ids;
  if (rules.dry_last_n >= 0) begin = std::max(begin, end - rules.dry_last_n);
  if (end - begin < 2) return;
  const int most = tokens_after_breaker(rules, begin, end);
  if (most < rules.dry_allowed_length) return;
  lengths_.resize(vocab_size_);
  for (const int32_t* place = begin; place < end - 1; place++) {
    const int limit = int(std::min<int64_t>(most, place - begin + 1));
    int length = 0;
    while (length < limit && place[-length] == end[-1 - length]) length++;
    if (length >= rules.dry_allowed_length && is_token(place[1]))
      lengths_[place[1]] = std::max(lengths_[place[1]], length + 1);
  }
  for (const int32_t* token = begin + 1; token < end; token++) {
    if (!is_token(*token) || lengths_[*token] == 0) continue;
    const double exponent = lengths_[*token] - 1 - rules.dry_allowed_length;
    const double penalty = rules.dry_multiplier * std::exp(rules.dry_log_base * exponent);
    logits[*token] -= float(std::min(penalty, kMaxPenalty));
    lengths_[*token] = 0;
  }
}

// Returns how many of the last tokens come after a breaker, at most kMaxCompared.
int LogitChanger::tokens_after_breaker(const LogitRules& rules, const int32_t* begin, const int32_t* end) const {
  const int most = int(std::min<int64_t>(kMaxCompared, end - begin));
  for (int count = 0; count < most; count++) {
    const int32_t* last = end - 1 - count;
    if (is_token(*last) && rules.breakers[*last / 32] >> (*last % 32) & 1) return count;
    const int32_t* stop = rules.long_breakers + rules.long_breakers_size;
    for (const int32_t* breaker = rules.long_breakers; breaker < stop; breaker += 1 + *breaker)
      if (count + *breaker <= most && std::equal(breaker + 1, breaker + 1 + *breaker, last + 1 - *breaker))
        return count;
  }
  return most;
}

}  // namespace engine
