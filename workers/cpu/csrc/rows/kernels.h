// The small operations between matrix products. Each works on one row.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine {

// The functions of workers/layers/activations.py, and softplus, which is used by gated attention.
enum class Activation : int32_t {
  silu = 0,
  gelu_tanh = 1,
  clamped_swiglu = 2,
  relu2 = 3,
  sigmoid = 4,
  gelu = 5,
  relu = 6,
  softplus = 7,
  quick_gelu = 8,
  clipped_gelu = 9,
  mish = 10,
  tanh = 11,
  relu6 = 12,
  leaky_relu = 13,
  hardswish = 14,
  laplace = 15,
  linear = 16,
};

// The trained parameters of an xIELU activation (arXiv 2411.13010).
struct Xielu {
  float positive, negative, linear, most;
};

// A matrix [rows of the product, rows of the other factor], with any strides.
struct Factors {
  const float* data;
  ptrdiff_t row_stride, column_stride;
  int columns;
};

enum class FactorFormat : int32_t { f32 = 0, bf16 = 1, int8 = 2 };

// The second factor of a LoRA adapter, [columns, rank]. It consists of blocks of kLowRankColumns columns, the last one
// padded with zeros. In float32, a block has `rank` rows of floats. In bf16, it has `rank` rows of words, and word i
// has column i in its low half and column i + 16 in its high half. In int8, it has one such row with the columns'
// scales; then, for every four elements of the rank, two rows of words with four codes each, of elements 0, 2, 1 and 3:
// one for the first 16 columns and one for the others.
struct LowRankFactor {
  const void* data;
  int32_t rank;
  FactorFormat format;
  const float* bias;  // added to the columns of each row; or null
};
constexpr int kLowRankColumns = 32;

// Returns the size in bytes of a block of a factor.
inline size_t low_rank_block_bytes(const LowRankFactor& factor) {
  const size_t numbers = size_t(factor.rank) * kLowRankColumns;
  if (factor.format == FactorFormat::int8) return numbers + kLowRankColumns * 2;
  return numbers * (factor.format == FactorFormat::bf16 ? 2 : 4);
}

// Tokens of a recurrence with a state of `keys` elements for each of `channels` channels (Mamba, arXiv 2312.00752).
// Steps have a row of `channels` for each token; rows of the others are `stride` apart.
struct ChannelScan {
  int tokens, keys, channels;
  const float *steps, *inputs;
  const float *b, *c;  // `keys` elements per token
  ptrdiff_t stride;
  const float* decays;  // [keys, channels]
};

struct RowKernels {
  // out = x / sqrt(mean of squares + eps), * weight if there is one; `out` may be `x`.
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  // out = (x - mean) / sqrt(variance + eps) * weight, + bias if there is one; `out` may be `x`.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* out);
  // x += y * factor
  void (*add_scaled)(float* x, const float* y, float factor, int n);
  // x *= factor
  void (*scale)(float* x, float factor, int n);
  // out = activation(gate) * up, or activation(gate) if `up` is null
  void (*gate)(Activation activation, const float* gate, const float* up, int n, float* out);
  // x, limited to low..high; a NaN stays one
  void (*clamp)(float* x, float low, float high, int n);
  // x = positive * x^2 + linear * x for positive x, else negative * (e^min(x, most) - 1 - x) + linear * x
  void (*xielu)(const Xielu& numbers, float* x, int n);
  // Rotates elements i and i + half of each head by the angle given by cos[i] and sin[i].
  void (*rotate)(float* heads, int num_heads, int head_dim, const float* cos, const float* sin, int half);
  // x = softcap * tanh(x / softcap)
  void (*soft_cap)(float* x, float softcap, int n);
  bool (*all_finite)(const float* x, int n);
  // Returns the index of the largest element, the first one if several are equal; -1 if any element is NaN.
  int (*argmax)(const float* x, int n, float* largest);

  // The operations of recurrent layers.
  // out = x * y; `out` may be `x`.
  void (*multiply)(const float* x, const float* y, int n, float* out);
  float (*dot)(const float* x, const float* y, int n);
  float (*sum)(const float* x, int n);
  // x = the positive part of x - threshold
  void (*exceed)(float* x, float threshold, int n);
  // out = sum over k of inputs[k] * taps[k * stride + ...], plus bias if there is one; then SiLU if `activates`.
  void (*convolve)(const float* const* inputs, const float* taps, int stride, int kernel, const float* bias,
                   bool activates, int n, float* out);
  // out += factors * matrix. Each element sums over the matrix's rows in order, however many rows `out` has.
  void (*multiply_add)(const Factors& factors, const float* matrix, ptrdiff_t matrix_stride, int rows, int columns,
                       float* out, ptrdiff_t out_stride);
  // For each token: state[k] = state[k] * exp(step * decays[k]) + input * b[k], and out += c[k] * state[k], for k in
  // order. The state is [keys, channels], and `out` has a row of `channels` for each token.
  void (*scan_channels)(const ChannelScan& scan, float* state, float* out);
  // out[r][i - begin] += sum over k of x[r][k] * column i of the factor, plus its bias, for columns [begin, end). Rows
  // of x are `x_stride` apart, rows of `out` are end - begin apart. `begin` is a multiple of kLowRankColumns. For int8
  // factors, rows of x are rounded to int16 multiples of a scale, so that their products are exact in int32.
  void (*add_low_rank)(const LowRankFactor& factor, const float* x, int x_stride, int rows, int begin, int end,
                       float* out);
};

#define ENGINE_ISA(set, linear, attention, rows, ...) \
  namespace rows {                                    \
  const RowKernels& row_kernels();                    \
  }
#include "isa/instruction_sets.inc"

}  // namespace engine
