// The recurrences of the layers.
#include <algorithm>
#include <cmath>

#include "phases/mixers/layout.h"
#include "phases/mixers/mixers.h"

namespace engine {

namespace {

// The tokens whose numbers stay in a cache while elements of a state are updated one after the other.
constexpr int kTokensAtOnce = 32;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
// For larger numbers, softplus(x) equals x in float32.
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

// Each channel has its own steps, and each element of its state another decay. With B and C of its group, the state is
//   h(t) = exp(step(t) * decay) * h(t - 1) + step(t) * x(t) * B(t)
// and the output C(t) . h(t) + skip * x(t), which replaces x(t).
void Mixers::scan_mamba1(const Mixer& m, const Sequence& sequence, const State& state, int begin, int end,
                         const Rows& rows, Buffer& buffer) const {
  const RowKernels& kernels = model_.rows;
  const int size = m.value_dim, keys = m.key_dim, num_tokens = sequence.num_rows;
  const ptrdiff_t stride = ptrdiff_t(rows.qkv_stride());
  MixingMemory memory(buffer, size_t(kTokensAtOnce) * 2 * size);
  float *const steps = memory.take(kTokensAtOnce * size), *const outputs = memory.take(kTokensAtOnce * size);
  const auto scan_tokens = [&](int head, float* first, int num_tokens) {
    const int channel = head * size, group = head / (m.num_heads / m.num_groups);
    float* const x = first + outputs_offset(m) + channel;
    const float* const b = first + selection_offset(m, group) + m.step_rank;
    for (int t = 0; t < num_tokens; t++) {
      float *const step = steps + t * size, *const out = outputs + t * size;
      std::copy_n(first + t * stride + channel, size, step);
      kernels.add_scaled(step, m.step_bias + channel, 1.0f, size);
      kernels.gate(Activation::softplus, step, nullptr, size, step);
      kernels.multiply(x + t * stride, m.skip + channel, size, out);
      kernels.multiply(x + t * stride, step, size, x + t * stride);
    }
    const size_t own = size_t(channel) * keys;
    kernels.scan_channels({num_tokens, keys, size, steps, x, b, b + keys, stride, m.decay + own}, state.target + own,
                          outputs);
    for (int t = 0; t < num_tokens; t++) std::copy_n(outputs + t * size, size, x + t * stride);
  };
  for (int head = begin; head < end; head++)
    for (int t = 0; t < num_tokens; t += kTokensAtOnce)
      scan_tokens(head, rows.qkv(sequence.first_row + t), std::min(kTokensAtOnce, num_tokens - t));
}

// With the gates i(t) of the input and r(t) of the decay, and a(t) = exp(decay * r(t)), the state is
//   h(t) = a(t) * h(t - 1) + sqrt(1 - a(t)^2) * i(t) * x(t)
// without the root at the first position. A segment has one token.
void Mixers::scan_rg_lru(const Mixer& m, const Sequence& sequence, const State& state, int begin, int end,
                         const Rows& rows, Buffer& buffer) const {
  const RowKernels& kernels = model_.rows;
  const int size = m.value_dim, num_tokens = sequence.num_rows;
  MixingMemory memory(buffer, size_t(num_tokens) * 2 * size);
  float* const gates = memory.take(0);
  const float* const tokens = convolved_.floats() + size_t(sequence.first_convolved) * m.channels;
  for (int head = begin; head < end; head++) {
    const float *const x = tokens + head * size, *const decay = m.decay + head * size;
    float* const h = state.target + head * size;
    for (int t = 0; t < num_tokens; t++) std::copy_n(m.gate_biases + head * 2 * size, 2 * size, gates + t * 2 * size);
    kernels.multiply_add({x, m.channels, 1, size}, m.gates + size_t(head) * 2 * size * size, 2 * size, num_tokens,
                         2 * size, gates, 2 * size);
    kernels.gate(Activation::sigmoid, gates, nullptr, num_tokens * 2 * size, gates);
    for (int t = 0; t < num_tokens; t++) {
      const float *const input = gates + t * 2 * size, *const recurrent = input + size;
      float* const out = rows.qkv(sequence.first_row + t) + outputs_offset(m) + head * size;
      for (int j = 0; j < size; j++) {
        const float a = std::exp(decay[j] * recurrent[j]);
        const float scale = sequence.position + t ? std::sqrt((1.0f - a) * (1.0f + a)) : 1.0f;
        out[j] = h[j] = a * h[j] + scale * input[j] * x[t * m.channels + j];
      }
    }
  }
}

// With the decay from token s to token c of a segment, `decay(c, s)`, the outputs of a head are
//   y(c) = decay(c, start) * C(c) @ state + sum over s <= c of decay(c, s) * step(s) * (C(c) . B(s)) * x(s) + skip *
//   x(c)
// and the state at the end is that at the start, decayed, + sum over s of decay(end, s) * step(s) * B(s) x(s).
void Mixers::scan_mamba2(const Mixer& m, const Sequence& sequence, const State& state, int begin, int end,
                         const Rows& rows, Buffer& buffer) const {
  const RowKernels& kernels = model_.rows;
  const int segment = m.segment, keys = m.key_dim, values = m.value_dim, inner = m.num_heads * values;
  const int num_tokens = sequence.num_earlier + sequence.num_rows, num_segments = (num_tokens + segment - 1) / segment;
  MixingMemory memory(buffer, size_t(num_segments) * segment * segment + size_t(segment) * (keys + 3));
  float* const scores = memory.take(size_t(num_segments) * segment * segment);
  float* const factors = memory.take(size_t(segment) * keys);
  float *const steps = memory.take(segment), *const decays = memory.take(segment), *const own = memory.take(segment);
  const float* const tokens = convolved_.floats() + size_t(sequence.first_convolved) * m.channels;
  const ptrdiff_t stride = m.channels, out_stride = rows.qkv(rows.first + 1) - rows.qkv(rows.first);
  int group = -1;
  for (int head = begin; head < end; head++) {
    const int own_group = head / (m.num_heads / m.num_groups);
    const float* const b = tokens + inner + own_group * keys;
    const float* const c = b + m.num_groups * keys;
    if (own_group != group) {
      group = own_group;
      for (int t = sequence.num_earlier; t < num_tokens; t++)
        for (int s = t / segment * segment; s <= t; s++)
          scores[size_t(t) * segment + s % segment] = kernels.dot(c + t * stride, b + s * stride, keys);
    }
    float* const matrix = state.target + size_t(head) * keys * values;
    for (int first = 0; first < num_tokens; first += segment) {
      const int count = std::min(segment, num_tokens - first);
      const int first_new = std::max(sequence.num_earlier - first, 0), num_new = count - first_new;
      const float* const x = tokens + first * stride + head * values;
      float total = 0.0f;
      for (int i = 0; i < count; i++) {
        const float* const raw = tokens + (first + i) * stride + m.num_convolved + head;
        steps[i] = m.step_bias ? std::clamp(softplus(*raw + m.step_bias[head]), m.min_step, m.max_step) : 1.0f;
        decays[i] = total += steps[i] * m.decay[head];
      }
      float* const out =
          rows.qkv(sequence.first_row + first + first_new - sequence.num_earlier) + inner + head * values;
      for (int i = 0; i < num_new; i++) {
        const int t = first_new + i;
        const float decay = std::exp(decays[t]);
        const float* const query = c + (first + t) * stride;
        for (int k = 0; k < keys; k++) factors[i * keys + k] = query[k] * decay;
        std::fill_n(out + i * out_stride, values, 0.0f);
      }
      kernels.multiply_add({factors, keys, 1, keys}, matrix, values, num_new, values, out, out_stride);
      for (int i = 0; i < num_new; i++) {
        const int t = first_new + i;
        for (int s = 0; s <= t; s++)
          own[s] = std::exp(decays[t] - decays[s]) * steps[s] * scores[size_t(first + t) * segment + s];
        kernels.multiply_add({own, 0, 1, t + 1}, x, stride, 1, values, out + i * out_stride, out_stride);
        if (m.skip) kernels.add_scaled(out + i * out_stride, x + t * stride, m.skip[head], values);
      }
      if (count < segment) break;
      for (int s = 0; s < segment; s++) {
        const float factor = steps[s] * std::exp(total - decays[s]);
        const float* const key = b + (first + s) * stride;
        for (int k = 0; k < keys; k++) factors[s * keys + k] = key[k] * factor;
      }
      kernels.scale(matrix, std::exp(total), keys * values);
      kernels.multiply_add({factors, 1, keys, segment}, x, stride, keys, values, matrix, values);
    }
  }
}

// With unit keys k and queries q, a token corrects the state's value for its key by
//   u(c) = strength(c) * (v(c) - (k(c) * decay(c, start)) @ state - sum over s < c of (k(c) . key(c, s)) * u(s))
// where key(c, s) = decay(c, s) * k(s), and its output is
//   y(c) = (q(c) * decay(c, start)) @ state + sum over s <= c of (q(c) . key(c, s)) * u(s).
// The state at the end is that at the start, decayed, + sum over s of key(end, s) u(s). Each element of a key has its
// own decay; in a gated delta net they are equal. Keys decay token by token, because the inverse of a decay would
// overflow.
void Mixers::scan_delta_net(const Mixer& m, const Sequence& sequence, const State& state, int begin, int end,
                            const Rows& rows, Buffer& buffer) const {
  const RowKernels& kernels = model_.rows;
  const int segment = m.segment, keys = m.key_dim, values = m.value_dim;
  const bool decays_elements = m.kind == MixerKind::kimi_delta_attention;
  const int num_tokens = sequence.num_earlier + sequence.num_rows;
  MixingMemory memory(buffer, size_t(segment) * (6 * keys + values + 1));
  float *const unit_keys = memory.take(size_t(segment) * keys), *const queries = memory.take(size_t(segment) * keys);
  float *const decayed_keys = memory.take(size_t(segment) * keys), *const factors = memory.take(size_t(segment) * keys);
  float *const decays = memory.take(size_t(segment) * keys), *const since_start = memory.take(size_t(segment) * keys);
  float *const corrections = memory.take(size_t(segment) * values), *const own = memory.take(segment);
  const float* const tokens = convolved_.floats() + size_t(sequence.first_convolved) * m.channels;
  const ptrdiff_t stride = m.channels, out_stride = rows.qkv(rows.first + 1) - rows.qkv(rows.first);
  const auto unit = [&](const float* x, float scale, float* out) {
    const float factor = scale / std::sqrt(kernels.dot(x, x, keys) + 1e-6f);
    for (int k = 0; k < keys; k++) out[k] = x[k] * factor;
  };
  const auto decay = [&](const float* steps, int head, float* out) {
    const int count = decays_elements ? keys : 1;
    const float* const bias = m.step_bias + head * count;
    for (int k = 0; k < count; k++) {
      const float step = steps[head * count + k] + bias[k];
      out[k] = std::exp(m.lowest_log_decay ? m.lowest_log_decay * sigmoid(-step * m.decay[head])
                                           : softplus(step) * m.decay[head]);
    }
    if (!decays_elements) std::fill_n(out, keys, out[0]);
  };
  const float query_scale = 1.0f / std::sqrt(float(keys));
  for (int head = begin; head < end; head++) {
    const int group = m.has_tiled_heads ? head % m.num_groups : head / (m.num_heads / m.num_groups);
    const float* const q = tokens + group * keys;
    const float* const k = q + m.num_groups * keys;
    const float* const v = tokens + 2 * m.num_groups * keys + head * values;
    float* const matrix = state.target + size_t(head) * keys * values;
    for (int first = 0; first < num_tokens; first += segment) {
      const int count = std::min(segment, num_tokens - first);
      const int first_new = std::max(sequence.num_earlier - first, 0), num_new = count - first_new;
      for (int i = 0; i < count; i++) {
        const float* const token = tokens + (first + i) * stride;
        float* const total = since_start + i * keys;
        decay(token + m.num_convolved + m.num_heads, head, decays + i * keys);
        if (i == 0)
          std::copy_n(decays, keys, total);
        else
          kernels.multiply(total - keys, decays + i * keys, keys, total);
        unit(k + (first + i) * stride, 1.0f, unit_keys + i * keys);
        if (i >= first_new) unit(q + (first + i) * stride, query_scale, queries + i * keys);
      }
      std::fill_n(corrections, count * values, 0.0f);
      kernels.multiply(unit_keys, since_start, count * keys, factors);
      kernels.multiply_add({factors, keys, 1, keys}, matrix, values, count, values, corrections, values);
      float* const out =
          rows.qkv(sequence.first_row + first + first_new - sequence.num_earlier) + outputs_offset(m) + head * values;
      for (int i = 0; i < num_new; i++) std::fill_n(out + i * out_stride, values, 0.0f);
      kernels.multiply(queries + first_new * keys, since_start + first_new * keys, num_new * keys, factors);
      kernels.multiply_add({factors, keys, 1, keys}, matrix, values, num_new, values, out, out_stride);
      for (int i = 0; i < count; i++) {
        const float* const token = tokens + (first + i) * stride;
        const float strength = m.strength * sigmoid(token[m.num_convolved + head]);
        float* const correction = corrections + i * values;
        for (int s = 0; s < i; s++) {
          float* const key = decayed_keys + s * keys;
          kernels.multiply(key, decays + i * keys, keys, key);
          own[s] = kernels.dot(unit_keys + i * keys, key, keys);
        }
        kernels.multiply_add({own, 0, 1, i}, corrections, values, 1, values, correction, values);
        const float* const value = v + (first + i) * stride;
        for (int j = 0; j < values; j++) correction[j] = strength * (value[j] - correction[j]);
        std::copy_n(unit_keys + i * keys, keys, decayed_keys + i * keys);
        if (i < first_new) continue;
        for (int s = 0; s <= i; s++) own[s] = kernels.dot(queries + i * keys, decayed_keys + s * keys, keys);
        kernels.multiply_add({own, 0, 1, i + 1}, corrections, values, 1, values, out + (i - first_new) * out_stride,
                             out_stride);
      }
      if (count < segment) break;
      const float* const total = since_start + (segment - 1) * keys;
      for (int j = 0; j < keys; j++) kernels.scale(matrix + j * values, total[j], values);
      kernels.multiply_add({decayed_keys, 1, keys, segment}, corrections, values, keys, values, matrix, values);
    }
  }
}

}  // namespace engine
