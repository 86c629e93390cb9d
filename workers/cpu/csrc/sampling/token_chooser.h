// Sampling of the next token of each row of logits, and log-probabilities. The token is the most likely one, or it is
// drawn at random with temperature, top-k, top-p and min-p, after the request's logit changes and other samplers.
//
// The rules, the integer weights and the random numbers are the same as in workers/sampling. A row's token depends only
// on its logits, its parameters, its seed and the tokens before it. The vocabulary is never sorted: a threshold finds
// the largest logits, and selection finds a share of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "sampling/kernels.h"
#include "sampling/logit_rules.h"

namespace engine {

inline int logit_blocks(int vocab_size) { return (vocab_size + kLogitBlock - 1) / kLogitBlock; }

// Returns the minimum weight that a nucleus must have.
inline int64_t share(int64_t total, double top_p) { return std::min(int64_t(std::ceil(double(total) * top_p)), total); }

// Returned instead of a token.
constexpr int32_t kNotANumber = -1;      // a NaN or an infinity among the logits
constexpr int32_t kNothingAllowed = -2;  // no logit above -infinity

// Log-probabilities: of the chosen token first, then of the most likely tokens, then of those that the request lists.
// They are those of the model's unchanged logits, or those with which the token was drawn, after all changes and
// filters.
struct LogprobRows {
  const bool* is_wanted;         // indexed by slot, like the next four
  const int64_t* num_top;        // the number of most likely tokens
  const bool* is_processed;      // whether the log-probabilities are those after all changes and filters
  const int32_t* const* listed;  // the tokens that the request lists
  const int64_t* num_listed;
  int64_t width;       // the length of a row, at least the number that any slot wants
  int32_t* token_ids;  // [rows, width]
  float* logprobs;     // [rows, width]
  int32_t* ranks;      // [rows], the rank of the chosen token, counting from 1

  // Copies a later row to the place of an earlier one.
  void move(int from, int to) const;
};

// Sampling parameters by slot, and the slots of the current rows.
struct SamplingRows {
  const bool* is_greedy;
  const float* inverse_temperature;
  const int64_t* top_k;       // the vocabulary's size for none
  const double* top_p;        // 1 for none
  const float* min_p_margin;  // the minimum logit minus the largest one, at most 0; -infinity for no min-p
  const int64_t* seed;
  const bool* changes_logits;
  const LogitRules* rules;   // the rules of slots that change logits
  const int32_t* token_ids;  // [slots, max_model_len], followed by drafts
  int64_t max_model_len;
  const int32_t* num_prompt_tokens;
  const int32_t* num_tokens;
  const uint32_t* const* grammar;  // masks of the next token and of the tokens after drafts, as in LogitRules; or null
  const int64_t* grammar_words;    // the number of words of each mask
  const LogprobRows* logprobs;     // null if no slot wants any
  const int64_t* slots;            // [rows]
  const int32_t* positions;        // [rows], the position of the token to choose
};

// Chooses tokens, one row at a time. Each thread needs its own object, because calls reuse its buffers.
class TokenChooser {
 public:
  explicit TokenChooser(int vocab_size);
  // Returns the token of a row. `maxima` has the largest logit of each block, or NaN if any logit in it is NaN. If
  // rules change the row's logits, they change `logits` and `maxima` in place.
  int32_t choose(const SamplingRows& rows, int row, float* logits, float* maxima);

 private:
  struct Candidate {
    uint64_t key;  // larger for a larger logit, and for a lower token of the same logit
    int64_t weight;
  };
  // A token, and the weight of all tokens from the largest down to this one.
  struct Choice {
    int32_t token;
    int64_t weight;
  };
  static bool larger(const Candidate& a, const Candidate& b) { return a.key > b.key; }

  void look_at(const float* logits, const float* maxima);
  void apply_samplers(const SamplingRows& rows, int row, float* logits);
  int32_t pick(const SamplingRows& rows, int row);
  void write_alternatives(const LogprobRows& logprobs, int row, int64_t slot);
  void write_chosen(const LogprobRows& logprobs, int row, const float* logits, int32_t token) const;
  void write_processed(const SamplingRows& rows, int row, int32_t token);
  float logprob(float logit) const;
  Candidate candidate(int32_t token, int64_t weight) const;
  int32_t first_of(float logit) const;
  int32_t draw_in_order(float floor, double uniform);
  int64_t weigh_blocks(float floor);
  void reserve_candidates();
  int64_t gather(float floor);
  void gather_level(int level);
  void weigh_levels(float floor);
  int64_t keep_top_k(int64_t top_k);
  float threshold(int count) const;
  Choice nth(int64_t target);
  Choice nth_of_candidates(int64_t target);

  const int vocab_size_, num_blocks_;
  std::vector<int64_t> block_weights_, weights_;
  std::vector<float> values_;
  std::vector<int32_t> tokens_;
  std::vector<uint16_t> levels_;
  std::vector<int64_t> level_weights_;
  std::vector<Candidate> candidates_;
  std::vector<float> raw_logits_;
  LogitChanger changer_;
  SamplerChain chain_;

  // State of the current row.
  const float* logits_ = nullptr;
  const float* maxima_ = nullptr;
  float peak_ = 0, inverse_temperature_ = 1;
  float raw_peak_ = 0;
  double log_total_ = 0;  // the logarithm of the sum of all weights
  int num_candidates_ = 0;
  bool is_wide_ = false;  // whether candidates are gathered from one level at a time
};

}  // namespace engine
