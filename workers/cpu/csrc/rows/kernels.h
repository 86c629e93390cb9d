// The small operations between matrix products. Each is for one row.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine {

enum class Activation : int32_t { silu = 0, gelu_tanh = 1 };

struct RowKernels {
  // out = x / sqrt(mean of squares + eps) * weight; `out` may be `x`.
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  // x += y * factor
  void (*add_scaled)(float* x, const float* y, float factor, int n);
  // x *= factor
  void (*scale)(float* x, float factor, int n);
  // out = activation(gate) * up
  void (*gate)(Activation activation, const float* gate, const float* up, int n, float* out);
  // Rotates elements i and i + half of each head by the angle of cos[i], sin[i].
  void (*rotate)(float* heads, int num_heads, int head_dim, const float* cos, const float* sin, int half);
  // x = softcap * tanh(x / softcap)
  void (*soft_cap)(float* x, float softcap, int n);
  bool (*all_finite)(const float* x, int n);
  // Returns the index of the largest element, the first one if several are equal; -1 if any element is NaN.
  int (*argmax)(const float* x, int n, float* largest);
};

#define ENGINE_ISA(set, linear, attention, rows, ...) \
  namespace rows { \
  const RowKernels& row_kernels(); \
  }
#include "isa/instruction_sets.inc"

}  // namespace engine
