#include "sampling/token_chooser.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "isa/isa.h"

namespace engine {

namespace {

// A nucleus of more than about this many tokens is wide: it is found by levels instead of by candidates.
constexpr int kNucleusDepth = 64;

// The streams of random numbers, as in workers/sampling/random.py.
constexpr uint32_t kTokenStream = 0, kXtcStream = 1;

// Returns a random number in [0, 1) with 53 bits, by Philox4x32-10 of (seed, position, stream). See Salmon, Moraes,
// Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
double uniform(uint64_t seed, uint64_t position, uint32_t stream) {
  uint32_t counter[4] = {uint32_t(position), uint32_t(position >> 32), stream, 0};
  uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t even = uint64_t(counter[0]) * 0xD2511F53u;
    const uint64_t odd = uint64_t(counter[2]) * 0xCD9E8D57u;
    counter[0] = uint32_t(odd >> 32) ^ counter[1] ^ key[0];
    counter[1] = uint32_t(odd);
    counter[2] = uint32_t(even >> 32) ^ counter[3] ^ key[1];
    counter[3] = uint32_t(even);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return std::ldexp(double(uint64_t(counter[0]) << 21 | counter[1] >> 11), -53);
}

// Returns a uniform integer in [0, total). The minimum is taken because the product may round up to the total.
int64_t random_target(double uniform, int64_t total) { return std::min(int64_t(uniform * double(total)), total - 1); }

// Maps floats to unsigned integers in the same order. Both zeros map to the same integer.
uint32_t ordered(float x) {
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
float from_ordered(uint32_t bits) {
  bits = bits & 0x80000000u ? bits & 0x7fffffffu : ~bits;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Returns NaN if any element is NaN.
float largest(const float* x, int n) {
  float top = -INFINITY;
  for (int i = 0; i < n; i++) {
    if (std::isnan(x[i])) return x[i];
    top = x[i] > top ? x[i] : top;
  }
  return top;
}

}  // namespace

TokenChooser::TokenChooser(int vocab_size)
    : vocab_size_(vocab_size),
      num_blocks_(logit_blocks(vocab_size)),
      block_weights_(num_blocks_),
      changer_(vocab_size) {}

int32_t TokenChooser::choose(const SamplingRows& rows, int row, float* logits, float* maxima) {
  const int64_t slot = rows.slots[row];
  const LogprobRows* logprobs = rows.logprobs && rows.logprobs->is_wanted[slot] ? rows.logprobs : nullptr;
  const float* raw_logits = logits;
  look_at(logits, maxima);
  const bool is_processed = logprobs && logprobs->is_processed[slot];
  // Do not change rows with a NaN or an infinity, because the changes could hide it.
  const bool may_change = peak_ < INFINITY;
  if (may_change && rows.grammar[slot]) {
    const int64_t num_drafts_before = rows.positions[row] - rows.num_tokens[slot];
    changer_.limit(rows.grammar[slot] + num_drafts_before * *rows.grammar_words, logits);
    kernels().sampling->block_maxima(logits, vocab_size_, maxima);
    look_at(logits, maxima);
  }
  if (logprobs && !is_processed) write_alternatives(*logprobs, row, slot);
  if (may_change && rows.changes_logits[slot]) {
    if (logprobs && !is_processed) {
      raw_logits_.assign(logits, logits + vocab_size_);
      raw_logits = raw_logits_.data();
    }
    changer_.change(rows.rules[slot],
                    {rows.token_ids + slot * rows.max_model_len, rows.num_prompt_tokens[slot], rows.positions[row]},
                    rows.grammar[slot] != nullptr, logits);
    kernels().sampling->block_maxima(logits, vocab_size_, maxima);
    look_at(logits, maxima);
    if (rows.rules[slot].num_samplers && std::isfinite(peak_)) {
      apply_samplers(rows, row, logits);
      kernels().sampling->block_maxima(logits, vocab_size_, maxima);
      look_at(logits, maxima);
    }
  }
  const int32_t token = pick(rows, row);
  if (is_processed)
    write_processed(rows, row, token);
  else if (logprobs)
    write_chosen(*logprobs, row, raw_logits, std::max(token, 0));
  return token;
}

void TokenChooser::look_at(const float* logits, const float* maxima) {
  logits_ = logits;
  maxima_ = maxima;
  peak_ = largest(maxima, num_blocks_);
}

void TokenChooser::apply_samplers(const SamplingRows& rows, int row, float* logits) {
  const int64_t slot = rows.slots[row];
  const LogitRules& rules = rows.rules[slot];
  const double noise = uniform(uint64_t(rows.seed[slot]), uint64_t(rows.positions[row]), kXtcStream);
  // Only tokens that a top-k may keep need to be looked at one by one.
  const bool is_limited = rules.samplers->kind == kTopK;
  const float floor = is_limited ? threshold(int(rules.samplers->first)) : -INFINITY;
  chain_.apply(rules.samplers, rules.num_samplers, noise, floor, logits, vocab_size_);
}

int32_t TokenChooser::pick(const SamplingRows& rows, int row) {
  const int64_t slot = rows.slots[row];
  if (std::isnan(peak_) || peak_ == INFINITY) return kNotANumber;
  if (peak_ == -INFINITY) return kNothingAllowed;
  if (rows.is_greedy[slot]) return first_of(peak_);
  inverse_temperature_ = rows.inverse_temperature[slot];
  const int64_t top_k = rows.top_k[slot];
  const double top_p = rows.top_p[slot];
  const float floor = peak_ + rows.min_p_margin[slot];
  const double noise = uniform(uint64_t(rows.seed[slot]), uint64_t(rows.positions[row]), kTokenStream);
  if (top_k >= vocab_size_ && top_p >= 1) return draw_in_order(floor, noise);

  int64_t needed;
  is_wide_ = false;
  if (top_k < vocab_size_) {
    gather(std::max(threshold(int(top_k)), floor));
    // top-p applies to the weight that top-k and min-p leave.
    needed = share(keep_top_k(top_k), top_p);
  } else {
    needed = share(weigh_blocks(floor), top_p);
    is_wide_ = gather(std::max(threshold(kNucleusDepth), floor)) < needed;
    if (is_wide_) weigh_levels(floor);
  }
  const Choice last = nth(needed - 1);
  return nth(random_target(noise, last.weight)).token;
}

int32_t TokenChooser::first_of(float logit) const {
  int block = 0;
  while (maxima_[block] != logit) block++;
  int token = block * kLogitBlock;
  while (logits_[token] != logit) token++;
  return token;
}

// Draws by inverse CDF in the order of the vocabulary.
int32_t TokenChooser::draw_in_order(float floor, double uniform) {
  int64_t target = random_target(uniform, weigh_blocks(floor));
  int block = 0;
  while (target >= block_weights_[block]) target -= block_weights_[block++];
  const int first = block * kLogitBlock, count = std::min(kLogitBlock, vocab_size_ - first);
  int64_t weights[kLogitBlock];
  kernels().sampling->weigh(logits_ + first, count, floor, peak_, inverse_temperature_, weights);
  int i = 0;
  while (target >= weights[i]) target -= weights[i++];
  return first + i;
}

// Returns the weight of all tokens whose logit is at least the floor, and sets block_weights_.
int64_t TokenChooser::weigh_blocks(float floor) {
  kernels().sampling->block_weights(logits_, vocab_size_, maxima_, floor, peak_, inverse_temperature_,
                                    block_weights_.data());
  return std::accumulate(block_weights_.begin(), block_weights_.end(), int64_t(0));
}

// Returns a threshold that at least `count` logits reach, but not many more.
float TokenChooser::threshold(int count) const {
  const bool by_block = 2 * count < num_blocks_;
  const float* values = by_block ? maxima_ : logits_;
  const int n = by_block ? num_blocks_ : vocab_size_;
  const int enough = count + count / 2;
  uint32_t low = ordered(-INFINITY), high = ordered(peak_) + 1;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const int reached = kernels().sampling->count_reaching(values, n, from_ordered(middle));
    (reached >= count ? low : high) = middle;
    if (reached >= count && reached <= enough) break;
  }
  return from_ordered(low);
}

TokenChooser::Candidate TokenChooser::candidate(int32_t token, int64_t weight) const {
  return {uint64_t(ordered(logits_[token])) << 32 | ~uint32_t(token), weight};
}

void TokenChooser::reserve_candidates() {
  tokens_.resize(vocab_size_);
  values_.resize(vocab_size_);
  weights_.resize(vocab_size_);
  candidates_.resize(vocab_size_);
}

// Makes candidates of all tokens whose logit is at least the floor. Returns their weight.
int64_t TokenChooser::gather(float floor) {
  reserve_candidates();
  int n = 0;
  for (int block = 0; block < num_blocks_; block++) {
    if (maxima_[block] < floor) continue;
    const int end = std::min((block + 1) * kLogitBlock, vocab_size_);
    for (int token = block * kLogitBlock; token < end; token++) {
      tokens_[n] = token;
      values_[n] = logits_[token];
      n += logits_[token] >= floor;
    }
  }
  num_candidates_ = n;
  kernels().sampling->weigh(values_.data(), n, -INFINITY, peak_, inverse_temperature_, weights_.data());
  int64_t total = 0;
  for (int i = 0; i < n; i++) {
    candidates_[i] = candidate(tokens_[i], weights_[i]);
    total += weights_[i];
  }
  return total;
}

// Keeps the top_k largest candidates. Returns their weight.
int64_t TokenChooser::keep_top_k(int64_t top_k) {
  Candidate* candidates = candidates_.data();
  if (num_candidates_ > top_k) {
    std::nth_element(candidates, candidates + top_k, candidates + num_candidates_, larger);
    num_candidates_ = int(top_k);
  }
  int64_t total = 0;
  for (int i = 0; i < num_candidates_; i++) total += candidates[i].weight;
  return total;
}

// Assigns tokens to levels by logit, and sums the weights of each level.
void TokenChooser::weigh_levels(float floor) {
  const SamplingKernels& kernels = *engine::kernels().sampling;
  levels_.resize(vocab_size_);
  level_weights_.assign(kNumLevels, 0);
  kernels.weigh(logits_, vocab_size_, floor, peak_, inverse_temperature_, weights_.data());
  kernels.levels(logits_, vocab_size_, peak_, inverse_temperature_ * (kNumLevels / kDeepest), levels_.data());
  for (int i = 0; i < vocab_size_; i++) level_weights_[levels_[i]] += weights_[i];
}

void TokenChooser::gather_level(int level) {
  int n = 0;
  for (int token = 0; token < vocab_size_; token++) {
    tokens_[n] = token;
    n += levels_[token] == level;
  }
  for (int i = 0; i < n; i++) candidates_[i] = candidate(tokens_[i], weights_[tokens_[i]]);
  num_candidates_ = n;
}

// Returns the first token, from the largest down, with which the cumulative weight exceeds the target.
TokenChooser::Choice TokenChooser::nth(int64_t target) {
  if (!is_wide_) return nth_of_candidates(target);
  int level = 0;
  int64_t before = 0;
  while (before + level_weights_[level] <= target) before += level_weights_[level++];
  gather_level(level);
  const Choice choice = nth_of_candidates(target - before);
  return {choice.token, before + choice.weight};
}

// Finds the token by partitioning the candidates. It and all larger ones move to the front, in no particular order.
TokenChooser::Choice TokenChooser::nth_of_candidates(int64_t target) {
  Candidate* candidates = candidates_.data();
  int begin = 0, end = num_candidates_;
  int64_t before = 0;
  while (end - begin > 1) {
    const int middle = begin + (end - begin) / 2;
    std::nth_element(candidates + begin, candidates + middle, candidates + end, larger);
    int64_t weight = before;
    for (int i = begin; i < middle; i++) weight += candidates[i].weight;
    if (weight > target) {
      end = middle;
    } else {
      before = weight;
      begin = middle;
    }
  }
  const Candidate& found = candidates[begin];
  return {int32_t(~uint32_t(found.key)), before + found.weight};
}

}  // namespace engine
