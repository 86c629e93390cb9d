#include "experts/router.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace engine {

namespace {

// It is added to a sum of scores before the division by this sum, so that the result is finite, as in the DeepSeek
// models.
constexpr float kSmallestSum = 1e-20f;

bool is_better(float score, float other) { return std::isnan(score) ? !std::isnan(other) : score > other; }

int best_of(const float* scores, int n) {
  int best = 0;
  for (int i = 1; i < n; i++)
    if (is_better(scores[i], scores[best])) best = i;
  return best;
}

void softmax(float* x, int n) {
  const float largest = *std::max_element(x, x + n);
  float sum = 0;
  for (int i = 0; i < n; i++) sum += x[i] = std::exp(x[i] - largest);
  for (int i = 0; i < n; i++) x[i] /= sum;
}

float group_score(const float* scores, int n, int num_best) {
  const int best = best_of(scores, n);
  if (num_best == 1 || n == 1) return scores[best];
  int second = best == 0 ? 1 : 0;
  for (int i = second + 1; i < n; i++)
    if (i != best && is_better(scores[i], scores[second])) second = i;
  return scores[best] + scores[second];
}

// Sets the scores of experts outside of the best groups to minus infinity.
void keep_best_groups(const Router& router, float* scores) {
  const int size = router.num_experts / router.num_groups;
  std::vector<float> group_scores(router.num_groups);
  for (int g = 0; g < router.num_groups; g++) group_scores[g] = group_score(scores + g * size, size, router.num_best);
  std::vector<bool> is_kept(router.num_groups);
  for (int i = 0; i < router.num_chosen_groups; i++) {
    const int group = best_of(group_scores.data(), router.num_groups);
    is_kept[group] = true;
    group_scores[group] = -INFINITY;
  }
  for (int g = 0; g < router.num_groups; g++)
    if (!is_kept[g]) std::fill_n(scores + g * size, size, -INFINITY);
}

// Each expert is chosen by the remaining logits. Its weight comes from a softmax over the remaining logits that are
// close to its own.
void mix_sparsely(const Router& router, const float* logits, int32_t* experts, float* weights) {
  std::vector<float> left(logits, logits + router.num_experts);
  for (int i = 0; i < router.num_chosen; i++) {
    const int best = experts[i] = best_of(left.data(), router.num_experts);
    const float largest = left[best];
    float sum = 0;
    for (int e = 0; e < router.num_experts; e++) {
      const float distance = (largest - logits[e]) / std::max(std::abs(logits[e]), largest);
      if (!(distance > 2 * router.mixer_noise)) sum += std::exp(left[e] - largest);
    }
    weights[i] = 1.0f / sum;
    left[best] = -INFINITY;
  }
}

// Adds the adjugate experts. Each has the number after those of its group.
void add_adjugates(const Router& router, int32_t* experts, float* weights) {
  const int size = router.adjugate_group, num_picked = router.num_picked();
  for (int i = 0; i < num_picked; i++) {
    const int group = experts[i] / size;
    experts[i] += group;
    experts[num_picked + i] = group * (size + 1) + size;
    weights[num_picked + i] = weights[i] * router.adjugate_scale;
  }
}

}  // namespace

void choose_experts(const Router& router, float* logits, int32_t token, int32_t* experts, float* weights) {
  const int n = router.num_experts, num_free = n - router.num_always;
  const int32_t* const after = router.second_tokens + router.num_second_tokens;
  const bool is_second = std::find(router.second_tokens, after, token) != after;
  const float* correction = router.correction;
  if (is_second) {
    logits += n;
    if (correction) correction += num_free;
  }
  if (router.softcap)
    for (int i = 0; i < n; i++) logits[i] = std::tanh(logits[i] / router.softcap) * router.softcap;
  if (router.scoring == Scoring::sparse_mixer) return mix_sparsely(router, logits, experts, weights);
  std::vector<float> choice;
  if (router.corrects_logits) choice.assign(logits, logits + n);
  float* scores = logits;
  if (router.scoring == Scoring::softmax)
    softmax(scores, n);
  else if (router.scoring == Scoring::sqrt_softplus)
    for (int i = 0; i < n; i++)
      scores[i] = std::sqrt(std::max(scores[i], 0.0f) + std::log1p(std::exp(-std::abs(scores[i]))));
  else
    for (int i = 0; i < n; i++) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
  if (!router.corrects_logits) choice.assign(scores, scores + n);
  if (correction)
    for (int i = 0; i < num_free; i++) {
      choice[i] += correction[i];
      if (std::isnan(choice[i])) scores[i] = choice[i];
    }
  if (router.num_groups > 1) keep_best_groups(router, choice.data());
  float sum = 0;
  const int num_picked = router.num_picked();
  for (int i = 0; i < num_picked; i++) {
    const int num_left = num_picked - i;
    experts[i] = router.experts_by_token        ? router.experts_by_token[size_t(token) * num_picked + i]
                 : num_left > router.num_always ? best_of(choice.data(), num_free)
                                                : n - num_left;
    choice[experts[i]] = -INFINITY;
    sum += weights[i] = scores[experts[i]];
  }
  const float divisor = router.renormalizes ? sum + kSmallestSum : 1.0f;
  for (int i = 0; i < num_picked; i++) {
    weights[i] = weights[i] / divisor * router.scale;
    if (router.scales) weights[i] *= router.scales[experts[i]];
    if (router.skips_identities && experts[i] >= n - router.num_identities) weights[i] = 0.0f;
    experts[i] = experts[i] * router.num_mixtures() + is_second;
  }
  if (router.adjugate_group) add_adjugates(router, experts, weights);
}

}  // namespace engine
