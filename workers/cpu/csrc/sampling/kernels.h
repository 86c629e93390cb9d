// The passes over logits that choosing a token needs. They compute maxima, exact counts and sums of integer weights, so
// results do not depend on the order of the elements.
#pragma once

#include <cstdint>

namespace engine {

// The number of logits in a block, for which the maximum is stored.
constexpr int kLogitBlock = 32;
constexpr int kNumLevels = 1024;

// A logit that is this far below the peak, divided by the temperature, has weight 0, because exp(-30) < 2^-42.
constexpr float kDeepest = 30.0f;

constexpr float kWeightScale = 4398046511104.0f;  // 2^42

// A token's weight is the integer part of exp((logit - peak) * inverse_temperature) * kWeightScale, and zero below the
// floor. Sums of up to 2^20 weights fit in an int64.
struct SamplingKernels {
  // Writes the largest element of each block, or NaN if any is NaN.
  void (*block_maxima)(const float* x, int n, float* maxima);
  // Returns how many elements are at least `floor`.
  int (*count_reaching)(const float* x, int n, float floor);
  // Writes how far each element is below the peak, in units of 1 / scale, at most kNumLevels - 1.
  void (*levels)(const float* x, int n, float peak, float scale, uint16_t* levels);
  void (*weigh)(const float* x, int n, float floor, float peak, float inverse_temperature, int64_t* weights);
  // Writes the sum of the weights of each block. `maxima` are the blocks' maxima.
  void (*block_weights)(const float* x, int n, const float* maxima, float floor, float peak, float inverse_temperature,
                        int64_t* sums);
};

#define ENGINE_ISA(set, linear, attention, rows, sampling, ...) \
  namespace sampling {                                          \
  const SamplingKernels& sampling_kernels();                    \
  }
#include "isa/instruction_sets.inc"

}  // namespace engine
