// Sampling of the next token of each row of logits, and log-probabilities. The token is the most likely one or drawn at
// random under temperature, typical-p, top-k, top-p and min-p, after the request's logit changes.
//
// The rules, the integer weights and the random numbers are those of workers/sampling: a row's token is
// a function of its logits, its parameters, its seed and the tokens before it alone. The vocabulary is never
// sorted: the largest logits are found by a threshold, and a share of them by selection.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/logit_rules.h"
#include "sampling/kernels.h"

namespace engine {

inline int logit_blocks(int vocab_size) { return (vocab_size + kLogitBlock - 1) / kLogitBlock; }

// Returned instead of a token.
constexpr int32_t kNotANumber = -1;      // a NaN or an infinity among the logits
constexpr int32_t kNothingAllowed = -2;  // no logit above -infinity

// Log-probabilities from the model's unchanged logits: of the chosen token first, then of the most likely ones.
struct LogprobRows {
  const bool* is_wanted;   // by slot
  const int64_t* num_top;  // by slot
  int64_t width;           // of a row: as many as any slot wants
  int32_t* token_ids;      // [rows, width]
  float* logprobs;         // [rows, width]
  int32_t* ranks;          // [rows], 1 + how many are more likely than the chosen one

  // Overwrites what was written of an earlier row with that of a later one.
  void move(int from, int to) const;
};

// Sampling parameters by slot, and the slots of the rows at hand.
struct SamplingRows {
  const bool* is_greedy;
  const float* inverse_temperature;
  const int64_t* top_k;       // the vocabulary's size where there is none
  const double* top_p;        // 1 where there is none
  const double* typical_p;    // 1 where there is none
  const float* min_p_margin;  // how far below the largest a logit may be; -infinity where there is no min-p
  const int64_t* seed;
  const bool* changes_logits;
  const LogitRules* rules;   // of slots that change logits
  const int32_t* token_ids;  // [slots, max_model_len], those that are drafted behind the others
  int64_t max_model_len;
  const int32_t* num_prompt_tokens;
  const int32_t* num_tokens;
  const uint32_t* const* grammar;  // what it allows next, as in `LogitRules`, and after each draft; or null
  const int64_t* grammar_words;    // of each of these masks
  const LogprobRows* logprobs;     // null where no slot wants any
  const int64_t* slots;      // [rows]
  const int32_t* positions;  // [rows], of the token to be chosen
};

// Chooses tokens, one row at a time. Its buffers are reused; one for each thread.
class TokenChooser {
 public:
  explicit TokenChooser(int vocab_size);
  // `maxima` holds the largest logit of each block, NaN if one is NaN. Both are changed if the row's logits are.
  int32_t choose(const SamplingRows& rows, int row, float* logits, float* maxima);

 private:
  struct Candidate {
    uint64_t key;  // orders by logit, then by lower token
    int64_t weight;
  };
  // A token, and the weight of all from the largest down to it.
  struct Choice {
    int32_t token;
    int64_t weight;
  };
  static bool larger(const Candidate& a, const Candidate& b) { return a.key > b.key; }

  void look_at(const float* logits, const float* maxima);
  void change(const SamplingRows& rows, int row, float* logits);
  void mask_atypical(double typical_p, float* logits);
  int32_t pick(const SamplingRows& rows, int row);
  void write_most_likely(const LogprobRows& logprobs, int row, int64_t count);
  void write_chosen(const LogprobRows& logprobs, int row, const float* logits, int32_t token) const;
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

  // State of the current row.
  const float* logits_ = nullptr;
  const float* maxima_ = nullptr;
  float peak_ = 0, inverse_temperature_ = 1;
  float raw_peak_ = 0;
  double log_total_ = 0;  // of the weights of all tokens
  int num_candidates_ = 0;
  bool is_wide_ = false;  // candidates are gathered from one level at a time
};

}  // namespace engine
