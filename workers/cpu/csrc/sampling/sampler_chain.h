// Samplers that apply one after another, in the order of a request; see workers/sampling/chain.py, whose rules and
// integer weights are the same.
#pragma once

#include <cstdint>
#include <vector>

namespace engine {

// The numbers are those of `Kind` in workers/sampling/chain.py.
enum SamplerKind : int32_t {
  kTemperature = 0,
  kTopK = 1,
  kMinP = 2,
  kTopP = 3,
  kTypical = 4,
  kTopNSigma = 5,
  kXtc = 6,
};

struct ChainedSampler {
  int32_t kind;
  double first, second, third;
};

// Applies samplers to one row of logits at a time. Each thread needs its own object, because calls reuse its buffers.
class SamplerChain {
 public:
  // Sets removed logits to -infinity, and scales the others by the temperature. `noise` is a random number in [0, 1).
  // At least one logit must be finite, and none may be NaN or infinity. Logits below `floor` are removed first.
  void apply(const ChainedSampler* samplers, int count, double noise, float floor, float* logits, int vocab_size);

 private:
  struct Token {
    float logit;
    int32_t id;
    int64_t weight;
  };
  // Whether a is before b in the order from the most likely token to the least likely one.
  static bool before(const Token& a, const Token& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

  float peak() const;
  int64_t weigh();
  double mean_below_peak(int64_t total) const;
  void scale(const ChainedSampler& sampler);
  void keep_most_likely(int64_t count);
  void keep_share(double share);
  void keep_typical(double share);
  void keep_near(double sigmas);
  void exclude_top(double threshold);
  template <class Keeps>
  void keep_if(Keeps keeps);

  std::vector<Token> tokens_;
  std::vector<float> logits_;
  std::vector<int64_t> weights_;
};

}  // namespace engine
