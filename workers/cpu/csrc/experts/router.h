// The choice of a token's experts in a mixture of experts.
#pragma once

#include <cstdint>

namespace engine {

enum class Scoring : int32_t { softmax = 0, sigmoid = 1, sparse_mixer = 2, sqrt_softplus = 3 };

// The rules by which logits determine the choice; `ExpertsSpec` in workers/layers/specs/experts.py explains the fields.
struct Router {
  int32_t num_experts, num_chosen;  // num_chosen includes adjugate experts; the others fit in the chosen groups
  int32_t num_identities;           // the last ones of these, which return their input
  int32_t skips_identities;         // ... or return nothing
  int32_t num_always;               // the last ones of these, which every token chooses
  Scoring scoring;
  int32_t renormalizes;
  int32_t num_groups, num_chosen_groups;
  int32_t num_best;         // the number of best experts whose scores are summed to a group's score: 1 or 2
  int32_t corrects_logits;  // the correction is added to the logits instead of the scores
  float scale;
  float mixer_noise;
  float softcap;                    // the logits are capped to +-softcap; 0 for no cap
  const float* correction;          // [mixtures, num_experts - num_always], or null
  const float* scales;              // factors on the weights of experts, or null
  const int32_t* experts_by_token;  // [vocabulary, num_chosen], the experts of each token whatever its logits; or null
  int32_t num_second_tokens;        // 0 if there is only one mixture
  const int32_t* second_tokens;     // the tokens that choose among the experts of the second mixture
  int32_t adjugate_group;           // the number of experts that have an adjugate expert in common; 0 without these
  float adjugate_scale;             // the factor of an adjugate expert's weight

  int num_mixtures() const { return num_second_tokens ? 2 : 1; }
  // Returns the number of logits, one for each expert of all mixtures.
  int num_logits() const { return num_experts * num_mixtures(); }
  // Returns the number of experts that logits choose for a token.
  int num_picked() const { return adjugate_group ? num_chosen / 2 : num_chosen; }
  // Returns the number of experts that have matrices.
  int num_computed() const {
    return num_logits() - num_identities + (adjugate_group ? num_experts / adjugate_group : 0);
  }
  bool reads_token() const { return experts_by_token || num_second_tokens; }
};

// Chooses a token's experts and computes their weights. The best expert comes first; of equal ones, the one with the
// lower index. Replaces the logits, those of the first mixture before those of the second, by scores. A NaN counts as
// better than any number, so that it reaches the token's result. The adjugate experts of the chosen ones follow them.
void choose_experts(const Router& router, float* logits, int32_t token, int32_t* experts, float* weights);

}  // namespace engine
