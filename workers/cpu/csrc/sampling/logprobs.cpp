// Log-probabilities of a row's tokens, by the rules of workers/sampling/logprobs.py.
#include <algorithm>
#include <cmath>

#include "isa/isa.h"
#include "sampling/token_chooser.h"

namespace engine {

void LogprobRows::move(int from, int to) const {
  if (from == to) return;
  std::copy_n(token_ids + from * width, width, token_ids + to * width);
  std::copy_n(logprobs + from * width, width, logprobs + to * width);
  ranks[to] = ranks[from];
}

// If the largest logit is NaN or infinite, every probability is 0, and the tokens are arbitrary.
void TokenChooser::write_alternatives(const LogprobRows& logprobs, int row, int64_t slot) {
  const int64_t count = logprobs.num_top[slot];
  int32_t* token_ids = logprobs.token_ids + row * logprobs.width + 1;
  float* values = logprobs.logprobs + row * logprobs.width + 1;
  raw_peak_ = peak_;
  inverse_temperature_ = 1;
  log_total_ = std::isfinite(peak_) ? std::log(double(weigh_blocks(-INFINITY)) / kWeightScale) : 0;
  if (!std::isfinite(peak_)) {
    std::fill_n(token_ids, count, 0);
    std::fill_n(values, count, -INFINITY);
  } else if (count) {
    gather(threshold(int(count)));
    Candidate* candidates = candidates_.data();
    std::partial_sort(candidates, candidates + count, candidates + num_candidates_, larger);
    for (int i = 0; i < count; i++) {
      token_ids[i] = int32_t(~uint32_t(candidates[i].key));
      values[i] = logprob(logits_[token_ids[i]]);
    }
  }
  for (int64_t i = 0; i < logprobs.num_listed[slot]; i++) {
    token_ids[count + i] = logprobs.listed[slot][i];
    values[count + i] = logprob(logits_[logprobs.listed[slot][i]]);
  }
}

void TokenChooser::write_chosen(const LogprobRows& logprobs, int row, const float* logits, int32_t token) const {
  const float logit = logits[token];
  logprobs.token_ids[row * logprobs.width] = token;
  logprobs.logprobs[row * logprobs.width] = logprob(logit);
  logprobs.ranks[row] = 1 + kernels().sampling->count_reaching(logits, vocab_size_, std::nextafter(logit, INFINITY));
}

// Writes the probabilities with which `token` was just drawn. Tokens that cannot be drawn have a probability of 0.
void TokenChooser::write_processed(const SamplingRows& rows, int row, int32_t token) {
  const LogprobRows& logprobs = *rows.logprobs;
  const int64_t slot = rows.slots[row], count = logprobs.num_top[slot], num_listed = logprobs.num_listed[slot];
  int32_t* token_ids = logprobs.token_ids + row * logprobs.width;
  float* values = logprobs.logprobs + row * logprobs.width;
  std::fill_n(token_ids, count + 1, 0);
  std::fill_n(values, count + 1 + num_listed, -INFINITY);
  std::copy_n(logprobs.listed[slot], num_listed, token_ids + count + 1);
  logprobs.ranks[row] = 1;
  if (token < 0) return;
  token_ids[0] = token;
  reserve_candidates();
  Candidate* candidates = candidates_.data();
  int num_kept = 1;
  int64_t total = 1;
  if (rows.is_greedy[slot]) {
    candidates[0] = candidate(token, 1);
  } else {
    gather(peak_ + rows.min_p_margin[slot]);
    std::sort(candidates, candidates + num_candidates_, larger);
    const int most = int(std::min(int64_t(num_candidates_), rows.top_k[slot]));
    int64_t weight = 0;
    for (int i = 0; i < most; i++) weight += candidates[i].weight;
    const int64_t needed = share(weight, rows.top_p[slot]);
    for (num_kept = 0, total = 0; total < needed; num_kept++) total += candidates[num_kept].weight;
  }
  if (num_listed) values_.assign(vocab_size_, -INFINITY);
  for (int i = 0; i < num_kept; i++) {
    const int32_t kept = int32_t(~uint32_t(candidates[i].key));
    const float value = float(std::log(double(candidates[i].weight) / double(total)));
    if (i < count) {
      token_ids[1 + i] = kept;
      values[1 + i] = value;
    }
    if (kept == token) {
      values[0] = value;
      logprobs.ranks[row] = i + 1;
    }
    if (num_listed) values_[kept] = value;
  }
  for (int64_t i = 1 + count; i < 1 + count + num_listed; i++) values[i] = values_[token_ids[i]];
}

float TokenChooser::logprob(float logit) const {
  return std::isfinite(raw_peak_) ? float(double(logit - raw_peak_) - log_total_) : -INFINITY;
}

}  // namespace engine
