#include "sampling/sampler_chain.h"

#include <algorithm>
#include <cmath>

#include "isa/isa.h"
#include "sampling/kernels.h"
#include "sampling/token_chooser.h"

namespace engine {

namespace {

constexpr double kLeastTemperature = 1e-5;

// Deviations of logits are summed up as integers, in units of 1 / kSigmaScale. Larger distances from the peak count as
// kFarthest, so that the sum of squares fits into an int64.
constexpr float kSigmaScale = 4096, kFarthest = 1000;

}  // namespace

void SamplerChain::apply(const ChainedSampler* samplers, int count, double noise, float floor, float* logits,
                         int vocab_size) {
  tokens_.clear();
  for (int id = 0; id < vocab_size; id++)
    if (logits[id] >= floor && logits[id] > -INFINITY) tokens_.push_back({logits[id], id, 0});
  for (int i = 0; i < count; i++) {
    const ChainedSampler& sampler = samplers[i];
    switch (sampler.kind) {
      case kTemperature:
        scale(sampler);
        break;
      case kTopK:
        keep_most_likely(int64_t(sampler.first));
        break;
      case kMinP: {
        const float least = peak() + float(sampler.first);
        keep_if([&](const Token& token) { return token.logit >= least; });
        break;
      }
      case kTopP:
        keep_share(sampler.first);
        break;
      case kTypical:
        keep_typical(sampler.first);
        break;
      case kTopNSigma:
        keep_near(sampler.first);
        break;
      case kXtc:
        if (noise < sampler.first) exclude_top(sampler.second);
        break;
    }
  }
  std::fill_n(logits, vocab_size, -INFINITY);
  for (const Token& token : tokens_) logits[token.id] = token.logit;
}

float SamplerChain::peak() const {
  float peak = -INFINITY;
  for (const Token& token : tokens_) peak = std::max(peak, token.logit);
  return peak;
}

template <class Keeps>
void SamplerChain::keep_if(Keeps keeps) {
  tokens_.erase(std::remove_if(tokens_.begin(), tokens_.end(), [&](const Token& token) { return !keeps(token); }),
                tokens_.end());
}

// Sets the weights. Returns their sum.
int64_t SamplerChain::weigh() {
  const int n = int(tokens_.size());
  logits_.resize(n);
  weights_.resize(n);
  for (int i = 0; i < n; i++) logits_[i] = tokens_[i].logit;
  kernels().sampling->weigh(logits_.data(), n, -INFINITY, peak(), 1.0f, weights_.data());
  int64_t total = 0;
  for (int i = 0; i < n; i++) total += tokens_[i].weight = weights_[i];
  return total;
}

// Returns the expected value of a logit minus the largest one, given the sum of the weights.
double SamplerChain::mean_below_peak(int64_t total) const {
  const float top = peak();
  int64_t depth = 0;
  for (const Token& token : tokens_) depth += int64_t(std::min(top - token.logit, kDeepest) * float(token.weight));
  return -(double(depth) / double(total));
}

void SamplerChain::scale(const ChainedSampler& sampler) {
  double temperature = sampler.first;
  const double range = sampler.second;
  if (range > 0 && tokens_.size() > 1) {
    const int64_t total = weigh();
    const double entropy = std::log(double(total) / double(kWeightScale)) - mean_below_peak(total);
    const double share = std::clamp(entropy / std::log(double(tokens_.size())), 0.0, 1.0);
    const double low = std::max(temperature - range, 0.0), high = temperature + range;
    temperature = low + (high - low) * std::pow(share, sampler.third);
  }
  const float top = peak(), inverse = float(1 / std::max(temperature, kLeastTemperature));
  for (Token& token : tokens_) token.logit = (token.logit - top) * inverse;
}

void SamplerChain::keep_most_likely(int64_t count) {
  if (int64_t(tokens_.size()) <= count) return;
  std::nth_element(tokens_.begin(), tokens_.begin() + count, tokens_.end(), before);
  tokens_.resize(count);
}

// Moves the tokens with the smallest values to the front, as many as have the weight `needed`; equal values have the
// order of `before`. Returns how many they are. Levels of values tell which tokens need to be compared.
template <class Token, class Value, class Before>
static size_t move_to_front(std::vector<Token>& tokens, int64_t needed, Value value, Before before) {
  const auto level = [&](const Token& token) {
    return int(std::min(value(token) * ((kNumLevels - 1) / kDeepest), float(kNumLevels - 1)));
  };
  int64_t level_weights[kNumLevels] = {};
  for (const Token& token : tokens) level_weights[level(token)] += token.weight;
  int last = 0;
  int64_t so_far = 0;
  while (so_far + level_weights[last] < needed) so_far += level_weights[last++];
  auto begin = std::partition(tokens.begin(), tokens.end(), [&](const Token& token) { return level(token) < last; });
  auto end = std::partition(begin, tokens.end(), [&](const Token& token) { return level(token) == last; });
  while (end - begin > 1) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, before);
    int64_t weight = so_far;
    for (auto token = begin; token < middle; token++) weight += token->weight;
    if (weight >= needed) {
      end = middle;
    } else {
      so_far = weight;
      begin = middle;
    }
  }
  return end - tokens.begin();
}

void SamplerChain::keep_share(double part) {
  const int64_t needed = share(weigh(), part);
  const auto below_peak = [top = peak()](const Token& token) { return top - token.logit; };
  tokens_.resize(move_to_front(tokens_, needed, below_peak, before));
}

void SamplerChain::keep_typical(double part) {
  const int64_t total = weigh();
  const float top = peak(), mean = float(mean_below_peak(total));
  const auto distance = [&](const Token& token) { return std::abs(token.logit - top - mean); };
  const auto closer = [&](const Token& a, const Token& b) { return distance(a) < distance(b); };
  const size_t count = move_to_front(tokens_, share(total, part), distance, closer);
  float farthest = 0;
  for (size_t i = 0; i < count; i++) farthest = std::max(farthest, distance(tokens_[i]));
  keep_if([&](const Token& token) { return distance(token) <= farthest; });
}

void SamplerChain::keep_near(double sigmas) {
  const float top = peak();
  int64_t sum = 0, sum_of_squares = 0;
  for (const Token& token : tokens_) {
    const int64_t scaled = int64_t(std::max(token.logit - top, -kFarthest) * kSigmaScale);
    sum += scaled;
    sum_of_squares += scaled * scaled;
  }
  const double count = double(tokens_.size()), mean = double(sum) / count;
  const double deviation = std::sqrt(std::max(double(sum_of_squares) / count - mean * mean, 0.0)) / kSigmaScale;
  const float least = top - float(deviation * sigmas);
  keep_if([&](const Token& token) { return token.logit >= least; });
}

void SamplerChain::exclude_top(double threshold) {
  const int64_t needed = std::max<int64_t>(share(weigh(), threshold), 1);
  const Token* last = nullptr;
  for (const Token& token : tokens_)
    if (token.weight >= needed && (!last || before(*last, token))) last = &token;
  if (!last) return;
  const int32_t kept = last->id;
  keep_if([&](const Token& token) { return token.weight < needed || token.id == kept; });
}

}  // namespace engine
