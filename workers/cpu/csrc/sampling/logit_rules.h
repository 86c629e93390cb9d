// Changes a request's logits before its token is chosen, by the rules of workers/sampling.
//
// The changes are computed from the tokens so far, and no state is kept between tokens. So rejected drafts leave
// nothing to undo.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/sampler_chain.h"

namespace engine {

// The tokens of a request before the one to be chosen.
struct History {
  const int32_t* token_ids;
  int32_t num_prompt_tokens, num_tokens;
};

// The logit changes of one slot. A null pointer means that its request does not use the feature.
struct LogitRules {
  const uint32_t* allowed;    // bit t % 32 of word t / 32 is set if token t is allowed
  const int32_t* bad_words;   // the length and the tokens of each word
  const int64_t* end_tokens;  // forbidden until the request has min_length tokens
  const int64_t* bias_tokens;
  const float* biases;
  int32_t bad_words_size, num_end_tokens, min_length, num_biases;
  int32_t has_penalties;
  float repetition_penalty, presence_penalty, frequency_penalty;
  // The rules of protocol/sampling_params.py for transcripts. Without timestamps, first_timestamp is 0.
  const int32_t* suppressed;
  const int32_t* begin_suppressed;
  int32_t num_suppressed, num_begin_suppressed;
  int32_t first_timestamp, end_token, max_initial_timestamp;
  // The penalty for repetitions of protocol/sampling_params.py; a multiplier of 0 is none. `breakers` has a bit for
  // each token that is a breaker, and `long_breakers` the length and the tokens of each of several tokens.
  int32_t dry_allowed_length, dry_last_n, long_breakers_size;
  double dry_multiplier, dry_log_base;
  const uint32_t* breakers;
  const int32_t* long_breakers;
  // The samplers that apply after all changes.
  const ChainedSampler* samplers;
  int32_t num_samplers;
};

// Changes logits, one row at a time. Each thread needs its own object, because calls reuse a buffer.
class LogitChanger {
 public:
  explicit LogitChanger(int vocab_size) : vocab_size_(vocab_size) {}
  // If the request has a grammar that allows nothing but end tokens, they are not forbidden.
  void change(const LogitRules& rules, const History& history, bool has_grammar, float* logits);
  // Forbids the tokens whose bit is not set.
  void limit(const uint32_t* allowed, float* logits) const;

 private:
  bool allows_only_ends(const LogitRules& rules, const float* logits) const;
  void follow_transcript(const LogitRules& rules, const History& history, float* logits) const;
  void place_timestamps(const LogitRules& rules, const History& history, float* logits) const;
  void forbid(int64_t first, int64_t end, float* logits) const;
  void forbid_ends_of(const int32_t* words, int size, const History& history, float* logits) const;
  void penalize(const LogitRules& rules, const History& history, float* logits);
  void penalize_repetitions(const LogitRules& rules, const History& history, float* logits);
  int tokens_after_breaker(const LogitRules& rules, const int32_t* begin, const int32_t* end) const;
  bool is_token(int64_t token) const { return token >= 0 && token < vocab_size_; }

  const int vocab_size_;
  std::vector<int32_t> counts_;   // how often each token occurs in the output; all zero between calls
  std::vector<int32_t> lengths_;  // one more than the longest repetition that each token continues; likewise
};

}  // namespace engine
