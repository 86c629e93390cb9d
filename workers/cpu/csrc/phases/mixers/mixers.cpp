#include "phases/mixers/mixers.h"

#include <algorithm>
#include <cmath>

#include "phases/mixers/layout.h"

namespace engine {

namespace {

// Channels are divided into units that are whole groups of activations.
constexpr int kChannelUnit = 64;
constexpr int kMostTaps = 16;
// With fewer multiplications than this, sharing takes longer than computing.
constexpr int64_t kNotWorthSharing = 6144;

int first_of_part(int part, int parts, int units) { return int(int64_t(units) * part / parts); }

}  // namespace

class Mixers::Inputs {
 public:
  // Copies the inputs of the state, whose memory may be overwritten afterwards. The inputs of the slice must stay in
  // the projection.
  Inputs(const Op& op, const Sequence& sequence, const float* stored, int begin, int end, const Rows& rows,
         float* memory)
      : op_(op),
        mixer_(*op.mixer),
        sequence_(sequence),
        begin_(begin),
        width_(end - begin),
        rows_(rows),
        earlier_(memory) {
    const Mixer& mixer = mixer_;
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
    const int row = sequence_.first_row + token - sequence_.num_earlier;
    if (op_.target == LinearTarget::block) return rows_.block(row) + begin_;
    return rows_.qkv(row) + op_.first_column + inputs_offset(mixer_) + begin_;
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
  const Op& op_;
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
  if (op.kind == OpKind::convolve && !is_followed_by_products(*op.mixer)) channels_ = op.mixer->channels;
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
  const bool has_heads = op.kind == OpKind::scan || op.kind == OpKind::convolve_heads;
  const int units = has_heads ? m.num_heads : (m.channels + kChannelUnit - 1) / kChannelUnit;
  const int num_sequences = int(sequences_.size());
  num_parts_ = std::clamp(kTilesPerThread * num_threads_ / num_sequences, 1, units);
  const int per_value = m.gates ? 2 * m.value_dim : op.kind == OpKind::scan ? m.key_dim : m.value_dim * m.num_taps;
  const int64_t per_row = has_heads ? int64_t(m.num_heads) * m.value_dim * per_value : int64_t(m.channels) * m.kernel;
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
  if (op.kind == OpKind::convolve_heads)
    return convolve_heads(op, sequence, first_of_part(of_sequence, num_parts_, m.num_heads),
                          first_of_part(of_sequence + 1, num_parts_, m.num_heads), rows, memory);
  const int units = (m.channels + kChannelUnit - 1) / kChannelUnit;
  const int begin = first_of_part(of_sequence, num_parts_, units) * kChannelUnit;
  const int end = std::min(first_of_part(of_sequence + 1, num_parts_, units) * kChannelUnit, m.channels);
  if (op.kind == OpKind::convolve) return convolve(op, sequence, begin, end, rows, memory);
  if (op.kind == OpKind::convolve_ngrams) return convolve_ngrams(op, sequence, begin, end, rows, memory);
  if (op.kind == OpKind::convolve_inside) return convolve_inside(op, sequence, begin, end, rows, memory);
  convolve_shortly(op, sequence, begin, end, rows, memory);
}

void Mixers::convolve_shortly(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows,
                              Buffer& buffer) const {
  const Mixer& m = *op.mixer;
  const int width = end - begin;
  MixingMemory memory(buffer, size_t(Inputs::num_earlier(m, sequence) + 1) * width);
  float* const out = memory.take(width);
  const State state = this->state(op, sequence);
  const Inputs inputs(op, sequence, state.source, begin, end, rows, memory.take(0));
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

// Later tokens come first, because each is replaced after the last time that it is read.
void Mixers::convolve_inside(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows,
                             Buffer& buffer) const {
  const Mixer& m = *op.mixer;
  const int width = end - begin;
  MixingMemory memory(buffer, size_t(Inputs::num_earlier(m, sequence) + 1) * width);
  float* const out = memory.take(width);
  const State state = this->state(op, sequence);
  const Inputs inputs(op, sequence, state.source, begin, end, rows, memory.take(0));
  inputs.store(state.target);
  for (int i = sequence.num_rows - 1; i >= 0; i--) {
    const int token = sequence.num_earlier + i;
    inputs.convolve(model_.rows, token, false, width, out);
    const float* const taps = rows.qkv(sequence.first_row + i) + op.num_columns;
    for (int head = begin / m.value_dim; op.num_columns && head * m.value_dim < end; head++) {
      const int first = std::max(begin, head * m.value_dim) - begin;
      const int size = std::min(end, (head + 1) * m.value_dim) - begin - first;
      for (int lag = 0; lag < m.num_taps; lag++)
        model_.rows.add_scaled(out + first, inputs.at(token - lag) + first, taps[head * m.num_taps + lag] * m.strength,
                               size);
    }
    std::copy_n(out, width, inputs.at(token));
  }
}

void Mixers::convolve_heads(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows,
                            Buffer& buffer) const {
  const Mixer& m = *op.mixer;
  const int size = m.value_dim, window = m.kernel - 1, count = sequence.num_rows, width = (end - begin) * size;
  const size_t num_earlier = size_t(Inputs::num_earlier(m, sequence)) * width;
  MixingMemory memory(buffer, size_t(window + 2 * count) * size + num_earlier);
  float *const x = memory.take(size_t(window + count) * size), *const out = memory.take(size_t(count) * size);
  const State state = this->state(op, sequence);
  const Inputs inputs(op, sequence, state.source, begin * size, end * size, rows, memory.take(num_earlier));
  inputs.store(state.target);
  for (int head = begin; head < end; head++) {
    for (int i = -window; i < count; i++)
      std::copy_n(inputs.at(sequence.num_earlier + i) + (head - begin) * size, size, x + (window + i) * size);
    for (int i = 0; i < count; i++) std::copy_n(m.bias + head * size, size, out + i * size);
    for (int lag = 0; lag < m.num_taps; lag++)
      model_.rows.multiply_add({x + (window - lag) * size, size, 1, size},
                               m.taps + (size_t(head) * m.num_taps + lag) * size * size, size, count, size, out, size);
    for (int i = 0; i < count; i++) {
      float* const row = rows.qkv(sequence.first_row + i);
      std::copy_n(row + op.num_columns + head * size, size, row + head * size);
      model_.rows.add_scaled(row + head * size, out + i * size, 1.0f, size);
    }
  }
}

void Mixers::convolve_ngrams(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows,
                             Buffer& buffer) const {
  const Mixer& m = *op.mixer;
  const int width = end - begin, num_convolved = std::clamp(m.num_convolved - begin, 0, width);
  MixingMemory memory(buffer, size_t(Inputs::num_earlier(m, sequence) + 1) * width);
  float* const out = memory.take(width);
  const State state = this->state(op, sequence);
  const Inputs inputs(op, sequence, state.source, begin, end, rows, memory.take(0));
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
  MixingMemory memory(buffer, size_t(Inputs::num_earlier(m, sequence)) * width);
  const State state = this->state(op, sequence);
  const size_t num_recurrent = size_t(m.num_heads) * m.key_dim * m.value_dim;
  const Inputs inputs(op, sequence, state.source ? state.source + num_recurrent : nullptr, begin, end, rows,
                      memory.take(0));
  if (m.multipliers)
    for (int token = sequence.num_earlier; token < num_tokens; token++)
      model_.rows.multiply(inputs.at(token), m.multipliers + inputs_offset(m) + begin, width, inputs.at(token));
  const bool activates = m.kind != MixerKind::rg_lru;
  const bool is_read = is_followed_by_products(m);
  float* out = is_read ? rows.qkv(sequence.first_row) + outputs_offset(m)
                       : convolved_.floats() + size_t(sequence.first_convolved) * m.channels;
  const size_t stride = is_read ? rows.qkv_stride() : m.channels;
  out += begin;
  for (int token = 0; token < num_tokens; token++, out += stride) {
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
  if (m.kind == MixerKind::mamba1) return scan_mamba1(m, sequence, state, begin, end, rows, memory);
  if (m.kind == MixerKind::rg_lru) return scan_rg_lru(m, sequence, state, begin, end, rows, memory);
  scan_delta_net(m, sequence, state, begin, end, rows, memory);
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
