// The operations of a program that compute each row of a slice independently.
#include <algorithm>
#include <cmath>

#include "program/program.h"

namespace engine {

namespace {

// With fewer elements in all rows than this, sharing them takes longer than computing them.
constexpr int kNotWorthSharing = 6144;

constexpr int kGatedColumns = 256;

}  // namespace

// Returns the number of tiles, or 0 after computing all rows in this thread.
int Program::share_rows(const Op& op, int width) {
  const int rows = slice_.num_tokens;
  if (rows > 1 && pool_.num_threads() > 1 && int64_t(rows) * width > kNotWorthSharing)
    return row_tiles_[model_.index_of(op)] = std::min(rows, kTilesPerThread * pool_.num_threads());
  for (int row = 0; row < rows; row++) run_row(op, rows_, row);
  return 0;
}

// Rows are committed before they are computed, because some operations change them in place, so each must be computed
// only once.
void Program::run_rows(const Op& op, Tile& tile) {
  if (!tile.commit()) return;
  const int64_t rows = slice_.num_tokens;
  const int tiles = row_tiles_[model_.index_of(op)];
  const int first = int(rows * tile.index / tiles), end = int(rows * (tile.index + 1) / tiles);
  for (int row = first; row < end; row++) run_row(op, rows_, row);
}

void Program::drop_masked(const Op& op, float* x, int token) {
  const Step& step = slice_.step;
  const int hidden_size = model_.shape.hidden_size;
  if (step.input_ids[token] == op.source) return void(std::fill_n(x, hidden_size, 0.0f));
  const int32_t* starts = step.query_start_loc;
  const int32_t* end = std::upper_bound(starts, starts + step.num_sequences + 1, token);
  const auto masked = std::count(step.input_ids + end[-1], step.input_ids + *end, op.source);
  if (masked) model_.rows.scale(x, 1.0f / (1.0f - float(masked) / float(*end - end[-1])), hidden_size);
}

void Program::run_row(const Op& op, const Rows& rows, int row) {
  const RowKernels& kernels = model_.rows;
  const int hidden_size = model_.shape.hidden_size;
  switch (op.kind) {
    case OpKind::embed:
      return embed(op, row);
    case OpKind::quantize: {
      const float* x = rows.residual(row);
      if (op.vectors[0]) {
        model_.norm(op, x, rows.normed(row));
        x = rows.normed(row);
        if (op.norm_gate) gate_norm(*op.norm_gate, rows, row);
      }
      if (const float* second = op.vectors[2]) {
        const float eps = model_.shape.index_eps;
        kernels.layer_norm(x, second, second + hidden_size, eps, hidden_size, rows.normed(row));
        x = rows.normed(row);
      }
      const size_t row_bytes = activation_row_bytes(op.activation_kind, hidden_size);
      return quantize_rows(op.activation_kind, x, hidden_size, 1, hidden_size, rows.activations(0, row, row_bytes));
    }
    case OpKind::quantize_columns: {
      const int size = op.num_columns;
      float* x = rows.qkv(row) + op.first_column;
      if (op.vectors[0]) kernels.rms_norm(x, op.vectors[0], op.eps, size, x);
      const size_t row_bytes = activation_row_bytes(op.activation_kind, size);
      return quantize_rows(op.activation_kind, x, size, 1, size, rows.activations(0, row, row_bytes));
    }
    case OpKind::norm_columns: {
      float* const x = rows.qkv(row) + op.first_column;
      return kernels.rms_norm(x, op.vectors[0], op.eps, op.num_columns, x);
    }
    case OpKind::norm_beside: {
      float* x = rows.qkv(row) + op.first_column;
      std::copy_n(x, op.num_columns, x + op.num_columns);
      return kernels.rms_norm(x, op.vectors[0], op.eps, op.num_columns, x);
    }
    case OpKind::norm_activations: {
      const int size = op.num_columns;
      float* x = reinterpret_cast<float*>(rows.activations(1, row, activation_row_bytes(ActivationKind::f32, size)));
      if (op.target == LinearTarget::part)
        norm_shared_activations(op, x, row);
      else
        kernels.rms_norm(x, op.vectors[0], op.eps, size, x);
      const size_t row_bytes = activation_row_bytes(op.activation_kind, size);
      return quantize_rows(op.activation_kind, x, size, 1, size, rows.activations(0, row, row_bytes));
    }
    case OpKind::share_activation_squares: {
      const size_t row_bytes = activation_row_bytes(ActivationKind::f32, op.num_columns);
      const auto* x = reinterpret_cast<const float*>(rows.activations(1, row, row_bytes));
      *ranks_.own_part(row) = kernels.dot(x, x, op.num_columns);
      return;
    }
    case OpKind::scale_heads: {
      const float log_position = std::log1p(float(slice_.step.positions[slice_.first_token + row]));
      float* head = rows.qkv(row) + op.first_column;
      for (int h = 0; h < op.num_heads; h++, head += op.head_dim)
        kernels.scale(head, op.vectors[0][h] * log_position + op.vectors[1][h], op.head_dim);
      return;
    }
    case OpKind::load_key:
      return attention_.load_key(op, rows.qkv(row), row);
    case OpKind::share_head_squares:
      return attention_.heads().share_squares(op, rows.qkv(row), row);
    case OpKind::store_index:
      return attention_.index_keys().store(op, rows.qkv(row), row);
    case OpKind::summarize_group:
      return attention_.index_keys().summarize_group(op, rows.qkv(row), row);
    case OpKind::average_group:
      return attention_.index_keys().average_group(op, row);
    case OpKind::store_entries:
      return attention_.store_entries(op, row);
    case OpKind::rotate_store:
      return attention_.rotate_store(op, rows.qkv(row), row);
    case OpKind::sum:
      return ranks_.sum_parts(op, rows, inputs_.row(row), row);
    case OpKind::route:
      return experts_.route(op, rows, row, inputs_.row(row));
    case OpKind::combine_experts:
      return experts_.combine(op, rows, row);
    case OpKind::share_squares:
      return mixers_.share_squares(op, rows, row);
    case OpKind::gate_mixed:
      return mixers_.gate(op, rows, row);
    case OpKind::norm:
      return model_.norm(op, rows.residual(row), rows.residual(row));
    case OpKind::place:
    case OpKind::add_placed:
      return place(op, rows, row);
    case OpKind::scale:
      return kernels.scale(rows.residual(row), op.scale, hidden_size);
    case OpKind::clamp:
      return clamp(op, rows, row);
    case OpKind::activate:
      if (op.num_columns) return kernels.gate(op.activation, rows.qkv(row), nullptr, op.num_columns, rows.qkv(row));
      return kernels.gate(op.activation, rows.block(row), nullptr, hidden_size, rows.residual(row));
    case OpKind::chain_columns:
      return inputs_.chain(op, rows, row);
    case OpKind::scale_add:
      kernels.multiply(rows.residual(row), op.vectors[0], hidden_size, rows.residual(row));
      kernels.add_scaled(rows.residual(row), op.vectors[2], 1.0f, hidden_size);
      if (!op.vectors[1]) return;
      kernels.multiply(rows.block(row), op.vectors[1], hidden_size, rows.block(row));
      return kernels.add_scaled(rows.residual(row), rows.block(row), 1.0f, hidden_size);
    case OpKind::rotate_heads:
      return attention_.heads().rotate(op, rows.qkv(row), row);
    case OpKind::average_heads:
      return attention_.heads().average(op, rows.qkv(row));
    case OpKind::keep_hidden: {
      const int64_t token = slice_.first_token + row;
      float* const hidden = slice_.step.hidden + token * slice_.step.hidden_stride + op.first_column;
      if (op.num_columns) return void(std::copy_n(rows.streams(row) + op.source, op.num_columns, hidden));
      return void(std::copy_n(rows.residual(row), hidden_size, hidden));
    }
    case OpKind::add_normed:
      model_.norm(op, rows.residual(row), rows.normed(row));
      return kernels.add_scaled(rows.residual(row), rows.normed(row), 1.0f, hidden_size);
    case OpKind::add_blocks:
      kernels.rms_norm(rows.block(row), op.vectors[0], op.eps, hidden_size, rows.block(row));
      kernels.rms_norm(rows.qkv(row), op.vectors[1], op.eps, hidden_size, rows.qkv(row));
      return kernels.add_scaled(rows.block(row), rows.qkv(row), 1.0f, hidden_size);
    case OpKind::share_gates:
      return products_.share_gates(op, rows, row);
    case OpKind::sparse_gates:
      return products_.sparse_gates(op, rows, row);
    case OpKind::embed_inputs:
      return inputs_.embed(op, row);
    case OpKind::add_inputs:
      return inputs_.add(op, rows, row);
    case OpKind::quantize_inputs:
      return inputs_.quantize(op, rows, row);
    case OpKind::keep_token:
      return inputs_.keep_token(row);
    case OpKind::drop_masked:
      return drop_masked(op, rows.residual(row), slice_.first_token + row);
    case OpKind::keep_inputs:
      return void(std::copy_n(rows.residual(row), hidden_size, inputs_.row(row) + op.first_column));
    case OpKind::add_kept: {
      const float* kept = op.vectors[0] ? op.vectors[0] : inputs_.row(row) + op.first_column;
      return kernels.add_scaled(rows.residual(row), kept, op.scale, hidden_size);
    }
    case OpKind::add_shortcut:
      return kernels.add_scaled(rows.residual(row), rows.shortcut(row), op.scale, hidden_size);
    case OpKind::join_inputs:
      return inputs_.join(op, rows, row);
    case OpKind::quantize_sum: {
      float* const x = rows.normed(row);
      std::copy_n(rows.block(row), hidden_size, x);
      kernels.add_scaled(x, rows.residual(row), 1.0f, hidden_size);
      model_.norm(op, x, x);
      const size_t row_bytes = activation_row_bytes(op.activation_kind, hidden_size);
      return quantize_rows(op.activation_kind, x, hidden_size, 1, hidden_size, rows.activations(0, row, row_bytes));
    }
    case OpKind::gate_by_inputs:
      return inputs_.gate(op, rows, row);
    case OpKind::expand_streams:
      return streams_.expand(rows, row);
    case OpKind::predict_streams:
      return streams_.predict(op, rows, row);
    case OpKind::correct_streams:
      return streams_.correct(op, rows, row);
    case OpKind::add_to_streams:
      return streams_.add_block(op, rows, row);
    case OpKind::load_stream:
      return streams_.load(op, rows, row);
    case OpKind::reduce_streams:
      return streams_.reduce(rows, row);
    case OpKind::repeat_streams:
      return streams_.repeat(rows, row);
    case OpKind::mix_streams:
      return streams_.mix(op, rows, row);
    case OpKind::norm_streams:
      return streams_.norm(op, rows, row);
    case OpKind::attend_streams:
      return streams_.attend(op, rows, row);
    case OpKind::add_to_stream:
      return streams_.add_to_one(op, rows, row);
    case OpKind::copy_streams:
      return streams_.copy(op, rows, row);
    case OpKind::join_block:
      return streams_.join_block(op, rows, row);
    case OpKind::gate_block:
      return streams_.gate_block(op, rows, row);
    case OpKind::embed_ngrams:
      return ngrams_.embed(op, rows, row);
    case OpKind::gate_ngrams:
      return ngrams_.gate(op, rows, row);
    case OpKind::update_streams:
      return streams_.update(op, rows, row);
    case OpKind::gated_norm_add:
      if (op.vectors[1]) kernels.multiply(rows.block(row), op.vectors[1], hidden_size, rows.block(row));
      kernels.rms_norm(rows.block(row), op.vectors[0], op.eps, hidden_size, rows.block(row));
      kernels.multiply(rows.residual(row), op.vectors[2], hidden_size, rows.residual(row));
      return kernels.add_scaled(rows.residual(row), rows.block(row), 1.0f, hidden_size);
    case OpKind::norm_add:
      if (op.reads_source && !slice_.has_source(row)) return;
      if (op.vectors[0]) model_.norm(op, rows.block(row), rows.block(row));
      return kernels.add_scaled(rows.residual(row), rows.block(row), op.scale, hidden_size);
    default:
      return write_hidden(op, rows, row);
  }
}

// Norms this rank's part of a row by the squares of all ranks.
void Program::norm_shared_activations(const Op& op, float* x, int row) const {
  float squares = 0.0f;
  for (int rank = 0; rank < ranks_.num_ranks(); rank++) squares += *ranks_.part_of(rank, row);
  model_.rows.multiply(x, op.vectors[0], op.num_columns, x);
  model_.rows.scale(x, 1.0f / std::sqrt(squares * op.scale + op.eps), op.num_columns);
}

// Gates are computed for a few columns at a time, so that they need no memory of the row.
void Program::gate_norm(const NormGate& gate, const Rows& rows, int row) const {
  const RowKernels& kernels = model_.rows;
  const int hidden_size = model_.shape.hidden_size;
  float *const x = rows.normed(row), *const low = rows.low_rank(row);
  for (int i = 0; i < gate.rank; i++) low[i] = kernels.dot(x, gate.down + size_t(i) * hidden_size, hidden_size);
  kernels.gate(Activation::silu, low, nullptr, gate.rank, low);
  float logits[kGatedColumns];
  for (int first = 0; first < hidden_size; first += kGatedColumns) {
    const int count = std::min(hidden_size - first, kGatedColumns);
    std::fill_n(logits, count, 0.0f);
    for (int i = 0; i < gate.rank; i++)
      kernels.add_scaled(logits, gate.up + size_t(i) * hidden_size + first, low[i], count);
    kernels.gate(Activation::sigmoid, logits, x + first, count, x + first);
  }
}

// Stages pass on all streams of a token, and the inputs of the layers in later stages.
void Program::write_hidden(const Op& op, const Rows& rows, int row) {
  const ModelShape& shape = model_.shape;
  float* hidden = slice_.step.hidden + (slice_.first_token + row) * slice_.step.hidden_stride;
  if (op.vectors[0]) return model_.norm(op, rows.residual(row), hidden);
  const int size = shape.num_streams ? shape.streams_size() : shape.hidden_size;
  std::copy_n(shape.num_streams ? rows.streams(row) : rows.residual(row), size, hidden);
  std::copy_n(inputs_.row(row) + op.first_column, op.num_columns, hidden + size);
}

// A NaN remains a NaN.
void Program::clamp(const Op& op, const Rows& rows, int row) {
  const size_t row_bytes = activation_row_bytes(ActivationKind::f32, op.num_columns);
  float* x = op.target == LinearTarget::qkv ? rows.qkv(row) : rows.block(row);
  if (op.target == LinearTarget::activations) x = reinterpret_cast<float*>(rows.activations(op.source, row, row_bytes));
  x += op.first_column;
  const float least = op.vectors[0][0], most = op.vectors[0][1];
  for (int i = 0; i < op.num_columns; i++) x[i] = std::min(std::max(x[i], least), most);
}

void Program::embed(const Op& op, int row) {
  const Step& step = slice_.step;
  const int token = slice_.first_token + row, hidden_size = model_.shape.hidden_size;
  float* residual = rows_.residual(row);
  if (op.num_parts && ranks_.are_several()) {
    const int index = step.input_ids[token] - ranks_.first_token_of(ranks_.rank());
    if (index >= 0 && index < op.parts[0]->n)
      unpack_token(op, row, index, ranks_.own_part(row));
    else
      std::fill_n(ranks_.own_part(row), hidden_size, 0.0f);
    std::fill_n(residual, hidden_size, 0.0f);
  } else if (op.num_parts) {
    unpack_token(op, row, step.input_ids[token], residual);
  } else {
    const ModelShape& shape = model_.shape;
    const float* hidden = step.hidden + token * step.hidden_stride;
    if (!shape.num_streams) std::copy_n(hidden, hidden_size, residual);
    std::copy_n(hidden, shape.streams_size(), rows_.streams(row));
    std::copy_n(hidden + (shape.num_streams ? shape.streams_size() : hidden_size), shape.input_size, inputs_.row(row));
  }
  if (op.scale != 1.0f) model_.rows.scale(residual, op.scale, hidden_size);
  for (int part = 1; part < op.num_parts; part++) {
    float* const other = rows_.normed(row);
    unpack_weight_row(*op.parts[part], part == 1 ? step.positions[token] : 0, other);
    model_.rows.add_scaled(residual, other, 1.0f, hidden_size);
  }
  ropes_.fill(row, step.positions[token], step.rotary ? step.rotary + 3 * token : nullptr);
}

// Writes a row of this rank's part of the embedding, including the change by the adapter of the slice's row.
void Program::unpack_token(const Op& op, int row, int index, float* out) {
  const int32_t* numbers = slice_.step.adapters;
  const int number = op.adapters && numbers ? numbers[slice_.first_token + row] : -1;
  const Adapter none{}, &adapter = number < 0 ? none : op.adapters[number];
  unpack_weight_row(adapter.whole ? *adapter.whole : *op.parts[0], index, out);
  if (!adapter.down) return;
  float* const low = rows_.low_rank(row);
  unpack_weight_row(*adapter.down, index, low);
  model_.rows.add_low_rank(adapter.up[0], low, op.adapter_rank, 1, 0, model_.shape.hidden_size, out);
}

void Program::place(const Op& op, const Rows& rows, int row) {
  const Step& step = slice_.step;
  const int index = step.placed ? step.placed[slice_.first_token + row] : -1;
  if (index < 0) return;
  const int hidden_size = model_.shape.hidden_size;
  const float* encoded = step.encoded + index * step.encoded_stride + op.first_column;
  if (op.kind == OpKind::add_placed) return model_.rows.add_scaled(rows.residual(row), encoded, 1.0f, hidden_size);
  std::copy_n(encoded, hidden_size, rows.residual(row));
  if (!op.num_parts) return;
  unpack_weight_row(*op.parts[0], step.positions[slice_.first_token + row], rows.normed(row));
  model_.rows.add_scaled(rows.residual(row), rows.normed(row), 1.0f, hidden_size);
}

}  // namespace engine
