// The description of a recurrent layer.
#pragma once

#include <cstdint>

#include "rows/kernels.h"

namespace engine {

enum class MixerKind : int32_t {
  short_convolution = 0,
  mamba2 = 1,
  gated_delta_net = 2,
  kimi_delta_attention = 3,
  rg_lru = 4,
  ngram_convolution = 5,
  mamba1 = 6,
  inner_convolution = 7,
  head_convolution = 8,
};

// This rank's share of a recurrent layer; see protocol/checkpoint/recurrent_layers.py.
//
// A row of its projection has, in this order:
//   short_convolution  the input's gate, the output's gate and the input, each of `channels` numbers
//   mamba2             the gate [heads, value_dim]; x [heads, value_dim], B and C [groups, key_dim], steps [heads]
//   gated_delta_net    queries and keys [groups, key_dim], values [heads, value_dim], strengths and steps [heads]; the
//                      gate [heads, value_dim]
//   kimi_delta_attention  the same, but steps [heads, key_dim]; then the inputs from which steps and gates are computed
//   rg_lru             the gate and the input, each of `channels` numbers: [heads, value_dim], with a key_dim of 1
//   mamba1             the input, which steps replace, the gate and the convolved input, each [heads, value_dim]; for
//                      each group, a vector of `step_rank` numbers, from which steps are computed, B and C [key_dim]
//   inner_convolution  the input, wherever the operation says. If that has `num_columns`, the token's own taps [heads,
//                      num_taps], from the last token on, begin there. Multiplied by `strength`, they are added to the
//                      taps of all channels of a head
//   head_convolution   the input, [heads, value_dim]
//   ngram_convolution  values [value_dim]; the input, of which the last kTokenDigits numbers are the token's digits
// An input is everything before the gate, or everything after it. A block holds the recurrent part [heads, key_dim,
// value_dim], then inputs. An n-gram convolution is beside another mixer, whose state comes first. A layer may have
// several inner convolutions, whose states follow each other.
struct Mixer {
  MixerKind kind;
  int32_t channels;       // the elements of an input
  int32_t num_convolved;  // the first ones of these, which are convolved
  int32_t kernel, segment;
  int32_t num_taps, distance;  // a token's convolution reads this many tokens, this far from each other
  int32_t state_offset;        // the numbers before its state in a block
  int32_t num_heads, num_groups, key_dim, value_dim;
  int32_t step_rank;
  int32_t norm_groups;        // the groups of the output's norm; 0 for no norm
  int32_t gates_before_norm;  // whether the gate comes before the norm, or after it
  int32_t has_tiled_heads;    // in a delta net, head i has group i modulo the number of groups
  Activation gate_activation;
  float min_step, max_step;
  float strength;          // a factor on the sigmoid, or on the token's own taps
  float lowest_log_decay;  // limits the logarithms of decays in Kimi delta attention; 0 for no limit
  // [num_taps, num_convolved]; of heads, from the token itself to the earliest, [heads, num_taps, value_dim, value_dim]
  const float* taps;
  const float* bias;         // [num_convolved], or null
  const float* multipliers;  // factors on the projection, or null
  // [heads]; `skip` may be null. In a Mamba-1 layer, `decay` is [heads, key_dim, value_dim], `skip` [heads, value_dim]
  const float *decay, *skip;
  const float* step_bias;  // one bias per step; null for steps of 1, which have no place in the projection
  const float* norm;       // the norm of the output, or of each head's output
  // For an RG-LRU, whose `decay` has an element per channel: for each head, the gates of its inputs and of its decays
  const float *gates, *gate_biases;  // [heads, value_dim, 2 * value_dim] and [heads, 2 * value_dim]
};

}  // namespace engine
