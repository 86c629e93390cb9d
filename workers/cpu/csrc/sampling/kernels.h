// The passes over logits that choosing a token takes. Float maxima, exact counts and integer weights: the
// order of the elements does not matter.
#pragma once

#include <cstdint>

namespace engine {

// Logits are looked at in blocks of so many neighbours.
constexpr int kLogitBlock = 32;
constexpr int kNumLevels = 1024;

// A logit so far below the peak, divided by the temperature, has no weight: exp(-30) < 2^-42.
constexpr float kDeepest = 30.0f;

constexpr float kWeightScale = 4398046511104.0f;  // 2^42

// A token's weight is exp((logit - peak) * inverse_temperature) * kWeightScale, an integer, and zero
// below the floor. Sums of up to 2^20 fit.
struct SamplingKernels {
  // The largest of each block, NaN if one is NaN.
  void (*block_maxima)(const float* x, int n, float* maxima);
  // How many elements are at least `floor`.
  int (*count_reaching)(const float* x, int n, float floor);
  // How far each element is below the peak, in units of 1 / scale, at most kNumLevels - 1.
  void (*levels)(const float* x, int n, float peak, float scale, uint16_t* levels);
  void (*weigh)(const float* x, int n, float floor, float peak, float inverse_temperature,
                int64_t* weights);
  // The sum of the weights of each block, whose maxima are known.
  void (*block_weights)(const float* x, int n, const float* maxima, float floor, float peak,
                        float inverse_temperature, int64_t* sums);
};

#define ENGINE_ISA(set, linear, attention, rows, sampling, ...)  \
  namespace sampling {                          \
  const SamplingKernels& sampling_kernels(); \
  }
#include "isa/instruction_sets.inc"

}  // namespace engine
