#include "phases/mixers.h"

#include <algorithm>
#include <cmath>

namespace engine {

namespace {

// Channels are divided into units that are whole groups of activations.
constexpr int kChannelUnit = 64;
constexpr int kMostTaps = 16;
// With fewer multiplications than this, sharing takes longer than computing.
constexpr int64_t kNotWorthSharing = 6144;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
// For larger numbers, softplus(x) equals x in float32.
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

int first_of_part(int part, int parts, int units) { return int(int64_t(units) * part / parts); }

bool begins_with_gate(const Mixer& m) { return m.kind == MixerKind::mamba2 || m.kind == MixerKind::rg_lru; }
// Returns the place of a scan's outputs in a row of the projection.
int outputs_offset(const Mixer& m) {
  return begins_with_gate(m) ? m.num_heads * m.value_dim : 2 * m.num_groups * m.key_dim;
}
int gate_offset(const Mixer& m) { return begins_with_gate(m) ? 0 : m.channels; }
int inputs_offset(const Mixer& m) {
  if (m.kind == MixerKind::ngram_convolution) return m.value_dim;
  return begins_with_gate(m) ? m.num_heads * m.value_dim : m.kind == MixerKind::short_convolution ? 2 * m.channels : 0;
}

// A row's numbers in a thread's memory.
class Memory {
 public:
  Memory(Buffer& buffer, size_t floats) {
    buffer.reserve(floats * sizeof(float));
    next_ = buffer.floats();
  }
  float* take(size_t floats) {
    float* const taken = next_;
    next_ += floats;
    return taken;
  }

 private:
  float* next_;
};

}  // namespace

class Mixers::Inputs {
 public:
  // Copies the inputs of the state, whose memory may be overwritten afterwards. The inputs of the slice must stay in
  // the projection.
  Inputs(const Mixer& mixer, const Sequence& sequence, const float* stored, int begin, int end, const Rows& rows,
         float* memory)
      : mixer_(mixer), sequence_(sequence), begin_(begin), width_(end - begin), rows_(rows), earlier_(memory) {
    const int window = mixer.kernel - 1;
    for (int i = 0; i < num_earlier(mixer, sequence); i++) {
      float* const input = earlier_ + i * width_;
      if (sequence.position - sequence.num_earlier - window + i < 0)
        std::fill_n(input, width_, 0.0f);
      else
        std::copy_n(stored + size_t(i) * mixer.channels + begin, width_, input);
    }
  }

  static int num_earlier(const Mixer& mixer, const Sequence& sequence) {
    return mixer.kernel - 1 + sequence.num_earlier;
  }

  float* at(int token) const {
    if (token < sequence_.num_earlier) return earlier_ + (token + mixer_.kernel - 1) * width_;
    return rows_.qkv(sequence_.first_row + token - sequence_.num_earlier) + inputs_offset(mixer_) + begin_;
  }
  // Convolves the inputs up to a token.
  void convolve(const RowKernels& kernels, int token, bool activates, int width, float* out) const {
    const float* taps[kMostTaps];
    const int count = mixer_.num_taps;
    for (int k = 0; k < count; k++) taps[k] = at(token - (count - 1 - k) * mixer_.distance);
    kernels.convolve(taps, mixer_.taps + begin_, mixer_.num_convolved, count,
                     mixer_.bias ? mixer_.bias + begin_ : nullptr, activates, width, out);
  }
  // Stores the inputs that the tokens after the slice need.
  void store(float* stored) const {
    const int window = mixer_.kernel - 1, num_tokens = sequence_.num_earlier + sequence_.num_rows;
    const int next_segment = num_tokens / mixer_.segment * mixer_.segment;
    for (int token = next_segment - window; token < num_tokens; token++, stored += mixer_.channels)
      std::copy_n(at(token), width_, stored + begin_);
  }

 private:
  const Mixer& mixer_;
  const Sequence& sequence_;
  const int begin_, width_;
  const Rows& rows_;
  float* const earlier_;
};

void Mixers::add_op(const Op& op) {
  if (!op.mixer) return;
  are_any_ = true;
  segment_ = op.mixer->segment;
  if (op.kind == OpKind::convolve) channels_ = op.mixer->channels;
}

void Mixers::begin_slice() {
  sequences_.clear();
  if (!are_any_) return;
  const Step& step = slice_.step;
  const int32_t *starts = step.query_start_loc, end_token = slice_.first_token + slice_.num_tokens;
  int num_convolved = 0;
  for (int s = slice_.first_sequence; s < step.num_sequences && starts[s] < end_token; s++) {
    const int first = std::max(starts[s], slice_.first_token), end = std::min(starts[s + 1], end_token);
    const int position = step.positions[first];
    sequences_.push_back({s, first - slice_.first_token, end - first, position, position % segment_, num_convolved});
    num_convolved += position % segment_ + end - first;
  }
  convolved_.reserve(sizeof(float) * num_convolved * channels_);
}

// Between two slices of a step, the state is in the block that will have it after the step, because the sequence may
// not have the blocks in between.
Mixers::State Mixers::state(const Op& op, const Sequence& sequence) const {
  const Step& step = slice_.step;
  const StepGroup& group = step.groups[op.group];
  const int32_t* blocks = group.block_table + slice_.table_row(sequence.index) * group.block_table_stride;
  const auto at = [&](int position) {
    const size_t block = blocks[position / model_.shape.block_size];
    return reinterpret_cast<float*>(step.kv_caches[op.layer] + block * size_t(model_.shape.block_bytes)) +
           op.mixer->state_offset;
  };
  float* const target = at(step.positions[step.query_start_loc[sequence.index + 1] - 1]);
  if (sequence.position == 0) return {nullptr, target};
  const bool is_first = step.query_start_loc[sequence.index] == slice_.first_token + sequence.first_row;
  return {is_first ? at(sequence.position - 1) : target, target};
}

const float* Mixers::stored_input(const Op& op, int row, int distance) const {
  const Sequence& sequence = sequence_of(row);
  const int token = sequence.num_earlier + row - sequence.first_row - distance;
  return state(op, sequence).source + size_t(token + op.mixer->kernel - 1) * op.mixer->channels;
}

int Mixers::begin(const Op& op, const Rows& rows) {
  const Mixer& m = *op.mixer;
  const bool is_scan = op.kind == OpKind::scan;
  const int units = is_scan ? m.num_heads : (m.channels + kChannelUnit - 1) / kChannelUnit;
  const int num_sequences = int(sequences_.size());
  num_parts_ = std::clamp(kTilesPerThread * num_threads_ / num_sequences, 1, units);
  const int per_value = m.gates ? 2 * m.value_dim : m.key_dim;
  const int64_t per_row = is_scan ? int64_t(m.num_heads) * m.value_dim * per_value : int64_t(m.channels) * m.kernel;
  if (num_threads_ > 1 && per_row * slice_.num_tokens > kNotWorthSharing) return num_sequences * num_parts_;
  num_parts_ = 1;
  for (int part = 0; part < num_sequences; part++) run_part(op, part, rows, own_memory_);
  return 0;
}

void Mixers::run(const Op& op, Tile& tile, const Rows& rows, Buffer& memory) {
  if (tile.commit()) run_part(op, tile.index, rows, memory);
}

void Mixers::run_part(const Op& op, int part, const Rows& rows, Buffer& memory) {
  const Mixer& m = *op.mixer;
  const Sequence& sequence = sequences_[part / num_parts_];
  const int of_sequence = part % num_parts_;
  if (op.kind == OpKind::scan)
    return scan(op, sequence, first_of_part(of_sequence, num_parts_, m.num_heads),
                first_of_part(of_sequence + 1, num_parts_, m.num_heads), rows, memory);
  const int units = (m.channels + kChannelUnit - 1) / kChannelUnit;
  const int begin = first_of_part(of_sequence, num_parts_, units) * kChannelUnit;
  const int end = std::min(first_of_part(of_sequence + 1, num_parts_, units) * kChannelUnit, m.channels);
  if (op.kind == OpKind::convolve) return convolve(op, sequence, begin, end, rows, memory);
  if (op.kind == OpKind::convolve_ngrams) return convolve_ngrams(op, sequence, begin, end, rows, memory);
  convolve_shortly(op, sequence, begin, end, rows, memory);
}

void Mixers::convolve_shortly(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows,
                              Buffer& buffer) const {
  const Mixer& m = *op.mixer;
  const int width = end - begin;
  Memory memory(buffer, size_t(Inputs::num_earlier(m, sequence) + 1) * width);
  float* const out = memory.take(width);
  const State state = this->state(op, sequence);
  const Inputs inputs(m, sequence, state.source, begin, end, rows, memory.take(0));
  const size_t row_bytes = activation_row_bytes(op.activation_kind, m.channels);
  const size_t offset = activation_offset(op.activation_kind, begin);
  for (int i = 0; i < sequence.num_rows; i++) {
    const int row = sequence.first_row + i, token = sequence.num_earlier + i;
    const float* gates = rows.qkv(row) + begin;
    model_.rows.multiply(inputs.at(token), gates, width, inputs.at(token));
    inputs.convolve(model_.rows, token, false, width, out);
    model_.rows.multiply(out, gates + m.channels, width, out);
    quantize_rows(op.activation_kind, out, width, 1, width, rows.activations(1, row, row_bytes) + offset);
  }
  inputs.store(state.target);
}

void Mixers::convolve_ngrams(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows,
                             Buffer& buffer) const {
  const Mixer& m = *op.mixer;
  const int width = end - begin, num_convolved = std::clamp(m.num_convolved - begin, 0, width);
  Memory memory(buffer, size_t(Inputs::num_earlier(m, sequence) + 1) * width);
  float* const out = memory.take(width);
  const State state = this->state(op, sequence);
  const Inputs inputs(m, sequence, state.source, begin, end, rows, memory.take(0));
  for (int i = 0; num_convolved && i < sequence.num_rows; i++) {
    inputs.convolve(model_.rows, sequence.num_earlier + i, true, num_convolved, out);
    model_.rows.add_scaled(rows.streams(sequence.first_row + i) + begin, out, 1.0f, num_convolved);
  }
  inputs.store(state.target);
}

void Mixers::convolve(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows,
                      Buffer& buffer) const {
  const Mixer& m = *op.mixer;
  const int width = end - begin, num_convolved = std::clamp(m.num_convolved - begin, 0, width);
  const int num_tokens = sequence.num_earlier + sequence.num_rows;
  Memory memory(buffer, size_t(Inputs::num_earlier(m, sequence)) * width);
  const State state = this->state(op, sequence);
  const size_t num_recurrent = size_t(m.num_heads) * m.key_dim * m.value_dim;
  const Inputs inputs(m, sequence, state.source ? state.source + num_recurrent : nullptr, begin, end, rows,
                      memory.take(0));
  if (m.multipliers)
    for (int token = sequence.num_earlier; token < num_tokens; token++)
      model_.rows.multiply(inputs.at(token), m.multipliers + inputs_offset(m) + begin, width, inputs.at(token));
  const bool activates = m.kind != MixerKind::rg_lru;
  float* out = convolved_.floats() + size_t(sequence.first_convolved) * m.channels + begin;
  for (int token = 0; token < num_tokens; token++, out += m.channels) {
    if (num_convolved) inputs.convolve(model_.rows, token, activates, num_convolved, out);
    std::copy_n(inputs.at(token) + num_convolved, width - num_convolved, out + num_convolved);
  }
  inputs.store(state.target + num_recurrent);
}

void Mixers::scan(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows, Buffer& memory) const {
  const Mixer& m = *op.mixer;
  const State state = this->state(op, sequence);
  const size_t size = size_t(m.key_dim) * m.value_dim;
  if (!state.source)
    std::fill(state.target + begin * size, state.target + end * size, 0.0f);
  else if (state.source != state.target)
    std::copy(state.source + begin * size, state.source + end * size, state.target + begin * size);
  if (m.kind == MixerKind::mamba2) return scan_mamba2(m, sequence, state, begin, end, rows, memory);
  if (m.kind == MixerKind::rg_lru) return scan_rg_lru(m, sequence, state, begin, end, rows, memory);
  scan_delta_net(m, sequence, state, begin, end, rows, memory);
}

// With the gates i(t) of the input and r(t) of the decay, and a(t) = exp(decay * r(t)), the state is
//   h(t) = a(t) * h(t - 1) + sqrt(1 - a(t)^2) * i(t) * x(t)
// without the root at the first position. A segment has one token.
void Mixers::scan_rg_lru(const Mixer& m, const Sequence& sequence, const State& state, int begin, int end,
                         const Rows& rows, Buffer& buffer) const {
  const RowKernels& kernels = model_.rows;
  const int size = m.value_dim, num_tokens = sequence.num_rows;
  Memory memory(buffer, size_t(num_tokens) * 2 * size);
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
  Memory memory(buffer, size_t(num_segments) * segment * segment + size_t(segment) * (keys + 3));
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
  Memory memory(buffer, size_t(segment) * (6 * keys + values + 1));
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

void Mixers::gate_before_norm(const Mixer& m, const Rows& rows, int row) const {
  const int inner = m.num_heads * m.value_dim;
  float* const out = rows.qkv(row) + outputs_offset(m);
  float* const gate = rows.qkv(row) + gate_offset(m);
  if (m.multipliers) model_.rows.multiply(gate, m.multipliers + gate_offset(m), inner, gate);
  if (m.gates_before_norm) model_.rows.gate(Activation::silu, gate, out, inner, out);
}

void Mixers::share_squares(const Op& op, const Rows& rows, int row) const {
  const Mixer& m = *op.mixer;
  gate_before_norm(m, rows, row);
  const float* const out = rows.qkv(row) + outputs_offset(m);
  *ranks_.own_part(row) = model_.rows.dot(out, out, m.num_heads * m.value_dim);
}

void Mixers::norm(const Op& op, float* out, int row) const {
  const Mixer& m = *op.mixer;
  const int inner = m.num_heads * m.value_dim, size = m.norm_groups ? inner / m.norm_groups : 0;
  if (op.target == LinearTarget::part) {
    float squares = 0.0f;
    for (int rank = 0; rank < ranks_.num_ranks(); rank++) squares += *ranks_.part_of(rank, row);
    model_.rows.multiply(out, m.norm, inner, out);
    return model_.rows.scale(out, 1.0f / std::sqrt(squares / float(inner * ranks_.num_ranks()) + op.eps), inner);
  }
  for (int g = 0; g < m.norm_groups; g++)
    // Each head of a delta net has the same weights.
    model_.rows.rms_norm(out + g * size, m.norm + (m.kind == MixerKind::mamba2 ? g * size : 0), op.eps, size,
                         out + g * size);
}

void Mixers::gate(const Op& op, const Rows& rows, int row) const {
  const Mixer& m = *op.mixer;
  const int inner = m.num_heads * m.value_dim;
  float* const out = rows.qkv(row) + outputs_offset(m);
  if (op.target != LinearTarget::part) gate_before_norm(m, rows, row);
  norm(op, out, row);
  if (!m.gates_before_norm) model_.rows.gate(m.gate_activation, rows.qkv(row) + gate_offset(m), out, inner, out);
  quantize_rows(op.activation_kind, out, inner, 1, inner,
                rows.activations(1, row, activation_row_bytes(op.activation_kind, inner)));
}

}  // namespace engine
