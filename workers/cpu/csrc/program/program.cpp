#include "program/program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "isa/isa.h"
#include "linear/bf16_block.h"
#include "linear/packed_layout.h"

namespace engine {

namespace {

constexpr int kRowBlock = 64;
// With so many rows tiles are cut smaller, so that the threads end at about the same time.
constexpr int kManyRows = 16;
constexpr int kTileWeights = 1 << 18;
// Rows of so few elements altogether are not worth sharing out among threads.
constexpr int kNotWorthSharing = 6144;

// Columns are shared out in units that are whole groups of activations; larger ones if there are many, and where
// the kernels read several tiles at once.
int unit_columns(const PackedWeight& w, int tiles) {
  return !is_integer(w.format) || w.n >= 16 * kColumnTile * tiles ? 4 * kColumnTile : 2 * kColumnTile;
}
// Wider tiles come first: what is left for the end is small.
int column_bound(const PackedWeight& w, int tile, int tiles) {
  const int unit = unit_columns(w, tiles);
  const int units = (w.n + unit - 1) / unit;
  return std::min((units / tiles * tile + std::min(units % tiles, tile)) * unit, w.n);
}
int widest_tile(const PackedWeight& w, int tiles) {
  const int unit = unit_columns(w, tiles);
  const int units = (w.n + unit - 1) / unit;
  return (units + tiles - 1) / tiles * unit;
}

const uint8_t* weights_at(const PackedWeight& w, int column) {
  return w.format == WeightFormat::bf16 ? bf16_block(w, column / kBF16BlockColumns)
                                        : w.data + tile_at(w.format, w.k, column / kColumnTile);
}

}  // namespace

Program::Buffer::~Buffer() { std::free(data_); }

void Program::Buffer::reserve(size_t bytes) {
  if (bytes <= bytes_) return;
  std::free(data_);
  bytes_ = (bytes + 63) / 64 * 64;
  data_ = static_cast<uint8_t*>(std::aligned_alloc(64, bytes_));
  if (data_ == nullptr) throw std::bad_alloc();
}

Program::Rows::Rows(const ModelShape& shape)
    : hidden_size_(shape.hidden_size),
      qkv_size_((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim),
      widest_(std::max({shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim})) {}

void Program::Rows::reserve(int rows) {
  residual_.reserve(sizeof(float) * rows * hidden_size_);
  block_.reserve(sizeof(float) * rows * hidden_size_);
  qkv_.reserve(sizeof(float) * rows * qkv_size_);
  for (Buffer& buffer : activations_) buffer.reserve(rows * (sizeof(float) * widest_ + 64));
}

Program::Scratch::Scratch(int max_rows, const KVLayout& kv, const ModelShape& shape)
    : attention(max_rows, kv.padded_head_dim()),
      tile(new float[std::max(2 * kTileFloats, max_rows * kv.head_dim)]),
      chooser(shape.vocab_size),
      rows(shape) {}

Program::Program(const ModelShape& shape)
    : shape_(shape),
      kv_{shape.kv_format, shape.num_kv_heads, shape.head_dim, shape.block_size},
      attention_(*kernels().attention),
      rows_(*kernels().rows),
      qkv_size_((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim),
      slice_rows_(shape),
      pool_(shape.num_threads) {
  const int max_rows = std::max(kTaskRows, shape.num_heads / shape.num_kv_heads);
  for (int i = 0; i < pool_.num_threads(); i++)
    scratch_.push_back(std::make_unique<Scratch>(max_rows, kv_, shape_));
}

void Program::add(const Op& op) {
  ops_.push_back(op);
  shares_.emplace_back();
  profile_.push_back(0);
  for (auto& scratch : scratch_) scratch->profile.push_back(0);
  segments_.clear();
}

std::vector<double> Program::profile() const {
  std::vector<double> sum = profile_;
  for (const auto& scratch : scratch_)
    for (size_t op = 0; op < scratch->profile.size(); op++)
      sum[op] += scratch->profile[op] / pool_.num_threads();
  return sum;
}

void Program::add_rope(const float* inverse_frequencies, int half, float factor) {
  ropes_.push_back({{inverse_frequencies, inverse_frequencies + half}, factor, {}});
}

bool Program::run(const Step& step) {
  for (int i = 0; i < step.num_tokens; i++)
    if (step.input_ids[i] < 0 || step.input_ids[i] >= shape_.vocab_size) return false;
  step_ = step;
  num_slices_ = (step.num_tokens + kSliceTokens - 1) / kSliceTokens;
  const int rows = std::min(step.num_tokens, kSliceTokens);
  slice_rows_.reserve(rows);
  queries_.reserve(sizeof(uint32_t) * rows * shape_.num_heads * attention_.query_words(kv_));
  if (segments_.empty()) find_segments();
  head_activations_.reserve(step.num_logit_rows * (sizeof(float) * shape_.hidden_size + 64));
  if (exchange_ && (step.sampling || step.logits))
    own_logits_.reserve(sizeof(float) * step.num_logit_rows *
                        (shape_.vocab_size / exchange_->num_ranks() + 1));
  if (step.sampling && !step.logits) {
    logits_.reserve(sizeof(float) * step.num_logit_rows * shape_.vocab_size);
    step_.logits = logits_.floats();
  }
  for (Rope& rope : ropes_)
    rope.tables.resize(std::max(rope.tables.size(), 2 * rows * rope.inverse_frequencies.size()));
  first_sequence_ = 0;
  timed_op_ = -1;
  pool_.run(*this);
  return true;
}

// The phases of each slice are the operations but for the head, whose products and choice follow last.
int Program::begin(int phase) {
  const auto now = std::chrono::steady_clock::now();
  if (timed_op_ >= 0)
    profile_[timed_op_] += std::chrono::duration<double>(now - op_start_).count();
  op_start_ = now;
  const int ops_of_slice = int(ops_.size()) - 1;
  const int head_phase = num_slices_ * ops_of_slice;
  if (phase < head_phase) {
    const int op = phase % ops_of_slice;
    if (op == 0) begin_slice(phase / ops_of_slice);
    timed_op_ = -1;
    // The pieces go through all operations but the first.
    if (op && num_pieces_) return op == 1 ? pool_.num_threads() : 0;
    timed_op_ = op;
    if (op >= segments_.back().first_op && !is_wanted(0, num_tokens_)) return 0;
    return begin_op(ops_[op], shares_[op]);
  }
  if (phase == head_phase && step_.num_logit_rows) {
    timed_op_ = ops_of_slice;
    if (step_.sampling)
      logit_maxima_.reserve(sizeof(float) * step_.num_logit_rows * logit_blocks(shape_.vocab_size));
    return step_.logit_rows ? begin_head(ops_.back(), shares_.back()) : 0;
  }
  timed_op_ = ops_of_slice + 1;
  if (phase > head_phase + 1) return -1;
  if (exchange_ && step_.logits && step_.logit_rows && step_.num_logit_rows) gather_logits();
  if (step_.num_logit_rows && step_.tokens) {
    if (step_.sampling) return step_.num_logit_rows;
    take_most_likely();
  }
  return -1;
}

void Program::run_tile(int phase, Tile& tile) {
  const int ops_of_slice = int(ops_.size()) - 1;
  const int head_phase = num_slices_ * ops_of_slice;
  if (phase == head_phase) return run_head(ops_.back(), shares_.back(), tile);
  if (phase > head_phase) return choose_token(tile);
  if (num_pieces_ && phase % ops_of_slice) return run_pieces(tile);
  const Op& op = ops_[phase % ops_of_slice];
  const Shares& shares = shares_[phase % ops_of_slice];
  switch (op.kind) {
    case OpKind::linear:
      return run_linear(op, shares, tile);
    case OpKind::gated_linear:
      return run_gated(op, shares, tile);
    case OpKind::attention:
      return run_attention(op, shares, tile);
    default:
      return run_rows(op, shares, tile);
  }
}

void Program::begin_slice(int slice) {
  pool_.wait_for_others();
  slice_ = slice;
  first_token_ = slice * kSliceTokens;
  num_tokens_ = std::min(step_.num_tokens - first_token_, kSliceTokens);
  while (step_.query_start_loc[first_sequence_ + 1] <= first_token_) first_sequence_++;
  for (TaskList& list : task_lists_) list.is_made = false;
  num_pieces_ = count_pieces();
  if (num_pieces_) {
    make_runs();
    pieces_.begin(num_pieces_, int(segments_.size()), pool_.num_threads(), reads_own_keys());
  }
}

bool Program::is_wanted(int first_row, int end_row) const {
  const auto is_in = [&](int row) { return first_token_ + first_row <= row && row < first_token_ + end_row; };
  return step_.wants_all_hidden ||
         std::any_of(step_.logit_rows, step_.logit_rows + step_.num_logit_rows, is_in);
}

int Program::begin_op(const Op& op, Shares& shares) {
  switch (op.kind) {
    case OpKind::linear:
      return share_columns(op, num_tokens_, op.num_parts, shares);
    case OpKind::gated_linear:
      return share_columns(op, num_tokens_, 1, shares);
    case OpKind::attention:
      return begin_attention(op, shares);
    case OpKind::rotate_store:
      return share_rows(op, qkv_size_, shares);
    case OpKind::sum:
      exchange_->meet();
      return share_rows(op, shape_.hidden_size, shares);
    default:
      return share_rows(op, shape_.hidden_size, shares);
  }
}

int Program::share_rows(const Op& op, int width, Shares& shares) {
  if (pool_.num_threads() > 1 && int64_t(num_tokens_) * width > kNotWorthSharing) {
    shares.row_tiles = std::min(num_tokens_, kTilesPerThread * pool_.num_threads());
    return shares.row_tiles;
  }
  for (int row = 0; row < num_tokens_; row++) run_row(op, slice_rows_, row);
  return 0;
}

int Program::share_columns(const Op& op, int rows, int num_parts, Shares& shares) {
  shares.row_blocks = (rows + kRowBlock - 1) / kRowBlock;
  const int tiles_per_thread = rows < kManyRows ? kTilesPerThread : 2 * kTilesPerThread;
  const int wanted = (tiles_per_thread * pool_.num_threads() + shares.row_blocks - 1) / shares.row_blocks;
  const int widest = kTileFloats / std::min(rows, kRowBlock);
  int64_t columns = 0;
  for (int i = 0; i < num_parts; i++) columns += op.parts[i]->n;
  int tiles = 0;
  for (int i = 0; i < num_parts; i++) {
    const int n = op.parts[i]->n;
    const int share = int((int64_t(n) * wanted + columns - 1) / columns);
    const int by_size = int(int64_t(n) * op.parts[i]->k / kTileWeights);
    int& column_tiles = shares.column_tiles[i];
    column_tiles = std::max({share, by_size, 1});
    while (widest_tile(*op.parts[i], column_tiles) > widest) column_tiles++;
    tiles += column_tiles;
  }
  return tiles * shares.row_blocks;
}

// Each row is done once: some are changed in place.
void Program::run_rows(const Op& op, const Shares& shares, Tile& tile) {
  if (!tile.commit()) return;
  const int end = int(int64_t(num_tokens_) * (tile.index + 1) / shares.row_tiles);
  for (int row = int(int64_t(num_tokens_) * tile.index / shares.row_tiles); row < end; row++)
    run_row(op, slice_rows_, row);
}

void Program::run_row(const Op& op, const Rows& rows, int row) {
  switch (op.kind) {
    case OpKind::embed:
      return embed(op, row);
    case OpKind::quantize: {
      const float* x = rows.residual(row);
      if (op.vectors[0]) {
        // No other operation needs the norm's result: it passes through the block's buffer.
        rows_.rms_norm(x, op.vectors[0], op.eps, shape_.hidden_size, rows.block(row));
        x = rows.block(row);
      }
      const size_t row_bytes = activation_row_bytes(op.activation_kind, shape_.hidden_size);
      return quantize_rows(op.activation_kind, x, shape_.hidden_size, 1, shape_.hidden_size,
                           rows.activations(0, row, row_bytes));
    }
    case OpKind::rotate_store:
      return rotate_store(op, rows.qkv(row), row);
    case OpKind::sum:
      return sum_parts(op, row);
    case OpKind::norm_add:
      rows_.rms_norm(rows.block(row), op.vectors[0], op.eps, shape_.hidden_size, rows.block(row));
      return rows_.add_scaled(rows.residual(row), rows.block(row), op.scale, shape_.hidden_size);
    default: {
      float* hidden = step_.hidden + size_t(first_token_ + row) * shape_.hidden_size;
      if (!op.vectors[0])
        std::copy_n(rows.residual(row), shape_.hidden_size, hidden);
      else
        rows_.rms_norm(rows.residual(row), op.vectors[0], op.eps, shape_.hidden_size, hidden);
    }
  }
}

void Program::embed(const Op& op, int row) {
  const int token = first_token_ + row;
  float* residual = slice_rows_.residual(row);
  if (op.num_parts && exchange_) {
    const int index = step_.input_ids[token] - first_token_of(exchange_->rank());
    if (index >= 0 && index < op.parts[0]->n)
      unpack_weight_row(*op.parts[0], index, own_part(row));
    else
      std::fill_n(own_part(row), shape_.hidden_size, 0.0f);
    std::fill_n(residual, shape_.hidden_size, 0.0f);
  } else if (op.num_parts) {
    unpack_weight_row(*op.parts[0], step_.input_ids[token], residual);
  } else {
    std::copy_n(step_.hidden + size_t(token) * shape_.hidden_size, shape_.hidden_size, residual);
  }
  if (op.scale != 1.0f) rows_.scale(residual, op.scale, shape_.hidden_size);
  const float position = float(step_.positions[token]);
  for (Rope& rope : ropes_) {
    const int half = int(rope.inverse_frequencies.size());
    float* cosines = rope.tables.data() + size_t(row) * 2 * half;
    for (int i = 0; i < half; i++) {
      const float angle = position * rope.inverse_frequencies[i];
      cosines[i] = std::cos(angle) * rope.factor;
      cosines[half + i] = std::sin(angle) * rope.factor;
    }
  }
}

// Where the weights begin that the thread reads after those of a tile: most of the time threads take tiles in turn, of
// this product and of those that follow, which are shared out as in the step before.
const uint8_t* Program::weights_after(const Op& op_of_tile, const Shares& shares, const Tile& tile) const {
  if (shares.row_blocks > 1) return nullptr;
  int index = tile.index + pool_.num_threads();
  for (const Op* op = &op_of_tile; op <= &ops_.back(); op++) {
    const bool has_weights = op->kind == OpKind::linear || op->kind == OpKind::gated_linear || op == &ops_.back();
    const int num_parts = !has_weights ? 0 : op->kind == OpKind::linear ? op->num_parts : 1;
    for (int part = 0; part < num_parts; part++) {
      const PackedWeight& weight = *op->parts[part];
      const int tiles = shares_[op - ops_.data()].column_tiles[part];
      if (tiles == 0) return nullptr;
      if (index < tiles) return weights_at(weight, column_bound(weight, index, tiles));
      index -= tiles;
    }
  }
  return nullptr;
}

// The sums of some rows and columns, side by side in the thread's memory.
float* Program::product(const Op& op, const Rows& rows, const Columns& columns, Scratch& scratch) {
  const PackedWeight& weight = *op.parts[columns.part];
  const size_t row_bytes = activation_row_bytes(op.input_kind, weight.k);
  float* sums = scratch.tile.get();
  if (columns.size())
    linear_rows(weight, op.input_kind, rows.activations(op.source, columns.first_row, row_bytes), columns.num_rows,
                columns.begin, columns.end, sums, columns.size(), scratch.readahead);
  if (const float* bias = op.vectors[columns.part])
    for (int r = 0; r < columns.num_rows; r++)
      rows_.add_scaled(sums + r * columns.size(), bias + columns.begin, 1.0f, columns.size());
  return sums;
}

void Program::write_product(const Op& op, const Rows& rows, const Columns& columns, float* sums) {
  int first = columns.begin;
  for (int part = 0; part < columns.part; part++) first += op.parts[part]->n;
  for (int i = 0; i < columns.num_rows; i++, sums += columns.size()) {
    const int row = columns.first_row + i;
    if (op.target == LinearTarget::residual)
      rows_.add_scaled(rows.residual(row) + first, sums, op.scale, columns.size());
    else
      std::copy_n(sums, columns.size(),
                  first + (op.target == LinearTarget::qkv     ? rows.qkv(row)
                           : op.target == LinearTarget::block ? rows.block(row)
                                                              : own_part(row)));
  }
}

void Program::run_linear(const Op& op, const Shares& shares, Tile& tile) {
  Columns columns;
  columns.first_row = tile.index % shares.row_blocks * kRowBlock;
  columns.num_rows = std::min(num_tokens_ - columns.first_row, kRowBlock);
  columns.part = 0;
  int index = tile.index / shares.row_blocks;
  while (index >= shares.column_tiles[columns.part]) index -= shares.column_tiles[columns.part++];
  const PackedWeight& weight = *op.parts[columns.part];
  columns.begin = column_bound(weight, index, shares.column_tiles[columns.part]);
  columns.end = column_bound(weight, index + 1, shares.column_tiles[columns.part]);
  Scratch& scratch = *scratch_[tile.thread];
  scratch.readahead.next_weights = weights_after(op, shares, tile);
  float* sums = product(op, slice_rows_, columns, scratch);
  scratch.readahead.next_weights = nullptr;
  if (tile.commit()) write_product(op, slice_rows_, columns, sums);
}

float* Program::gated_product(const Op& op, const Rows& rows, const Columns& columns, Scratch& scratch) {
  const size_t row_bytes = activation_row_bytes(op.input_kind, op.parts[0]->k);
  const uint8_t* x = rows.activations(0, columns.first_row, row_bytes);
  const int begin = columns.begin, size = columns.size();
  float* gate = scratch.tile.get();
  float* up = gate + kTileFloats;
  if (size) {
    const uint8_t* const then = scratch.readahead.next_weights;
    if (then) scratch.readahead.next_weights = weights_at(*op.parts[1], begin);
    linear_rows(*op.parts[0], op.input_kind, x, columns.num_rows, begin, columns.end, gate, size, scratch.readahead);
    scratch.readahead.next_weights = then;
    linear_rows(*op.parts[1], op.input_kind, x, columns.num_rows, begin, columns.end, up, size, scratch.readahead);
  }
  for (int r = 0; r < columns.num_rows; r++) {
    float* row_gate = gate + r * size;
    float* row_up = up + r * size;
    if (op.vectors[0]) rows_.add_scaled(row_gate, op.vectors[0] + begin, 1.0f, size);
    if (op.vectors[1]) rows_.add_scaled(row_up, op.vectors[1] + begin, 1.0f, size);
    rows_.gate(shape_.activation, row_gate, row_up, size, row_gate);
  }
  return gate;
}

void Program::write_gated(const Op& op, const Rows& rows, const Columns& columns, float* gate) {
  const size_t row_bytes = activation_row_bytes(op.activation_kind, shape_.intermediate_size);
  uint8_t* out = rows.activations(1, columns.first_row, row_bytes) +
                 activation_offset(op.activation_kind, columns.begin);
  for (int r = 0; r < columns.num_rows; r++, gate += columns.size(), out += row_bytes)
    quantize_rows(op.activation_kind, gate, columns.size(), 1, columns.size(), out);
}

void Program::run_gated(const Op& op, const Shares& shares, Tile& tile) {
  const PackedWeight& weight = *op.parts[0];
  const int index = tile.index / shares.row_blocks;
  Columns columns;
  columns.first_row = tile.index % shares.row_blocks * kRowBlock;
  columns.num_rows = std::min(num_tokens_ - columns.first_row, kRowBlock);
  columns.part = 0;
  columns.begin = column_bound(weight, index, shares.column_tiles[0]);
  columns.end = column_bound(weight, index + 1, shares.column_tiles[0]);
  Scratch& scratch = *scratch_[tile.thread];
  scratch.readahead.next_weights = weights_after(op, shares, tile);
  float* gate = gated_product(op, slice_rows_, columns, scratch);
  scratch.readahead.next_weights = nullptr;
  if (tile.commit()) write_gated(op, slice_rows_, columns, gate);
}

int Program::begin_head(const Op& op, Shares& shares) {
  const int rows = step_.num_logit_rows, hidden_size = shape_.hidden_size;
  const size_t row_bytes = activation_row_bytes(op.input_kind, hidden_size);
  for (int r = 0; r < rows; r++)
    quantize_rows(op.input_kind, step_.hidden + size_t(step_.logit_rows[r]) * hidden_size, hidden_size, 1,
                  hidden_size, head_activations_.bytes() + r * row_bytes);
  const int tiles = share_columns(op, rows, 1, shares);
  if (step_.tokens && !step_.sampling)
    best_.reserve(size_t(rows) * shares.column_tiles[0] * sizeof(Best));
  return tiles;
}

void Program::run_head(const Op& op, const Shares& shares, Tile& tile) {
  const PackedWeight& weight = *op.parts[0];
  const int row = tile.index % shares.row_blocks * kRowBlock;
  const int rows = std::min(step_.num_logit_rows - row, kRowBlock);
  const int index = tile.index / shares.row_blocks;
  const int begin = column_bound(weight, index, shares.column_tiles[0]);
  const int end = column_bound(weight, index + 1, shares.column_tiles[0]);
  const int columns = end - begin;
  const size_t row_bytes = activation_row_bytes(op.input_kind, weight.k);
  Scratch& scratch = *scratch_[tile.thread];
  float* out = scratch.tile.get();
  scratch.readahead.next_weights = weights_after(op, shares, tile);
  if (columns)
    linear_rows(weight, op.input_kind, head_activations_.bytes() + row * row_bytes, rows, begin, end,
                out, columns, scratch.readahead);
  scratch.readahead.next_weights = nullptr;
  if (!tile.commit()) return;
  for (int r = 0; r < rows; r++, out += columns) {
    if (op.scale != 1.0f) rows_.scale(out, op.scale, columns);
    if (op.attention.softcap != 0) rows_.soft_cap(out, op.attention.softcap, columns);
    // The product does not write there itself: rows that are pages apart contend for the same cache lines.
    if (step_.logits)
      std::memcpy((exchange_ ? own_logits_.floats() : step_.logits) + size_t(row + r) * weight.n + begin, out,
                  sizeof(float) * columns);
    if (step_.sampling && !exchange_)
      kernels().sampling->block_maxima(out, columns, logit_maxima(row + r) + begin / kLogitBlock);
    if (!step_.tokens || step_.sampling) continue;
    Best& best = bests()[size_t(row + r) * shares.column_tiles[0] + index];
    best = {-INFINITY, begin};
    if (columns == 0) continue;
    const int token = rows_.argmax(out, columns, &best.logit);
    best.index = token < 0 ? -1 : begin + token;
  }
}

// Of this rank's share of the vocabulary.
Program::Best Program::most_likely(int row) const {
  const Best* best = bests() + size_t(row) * shares_.back().column_tiles[0];
  Best winner = best[0];
  for (int i = 1; i < shares_.back().column_tiles[0]; i++) winner = likelier(winner, best[i]);
  if (exchange_ && winner.index >= 0) winner.index += first_token_of(exchange_->rank());
  return winner;
}

void Program::take_most_likely() {
  const int rows = step_.num_logit_rows;
  winners_.resize(rows);
  for (int row = 0; row < rows; row++) winners_[row] = most_likely(row);
  if (exchange_) exchange_winners();
  for (int row = 0; row < rows; row++) {
    const Best& winner = winners_[row];
    step_.tokens[row] = winner.index < 0 || winner.logit == INFINITY ? kNotANumber
                        : winner.logit == -INFINITY                  ? kNothingAllowed
                                                                     : winner.index;
  }
}

void Program::choose_token(Tile& tile) {
  if (!tile.commit()) return;
  const int row = tile.index;
  float* logits = step_.logits + size_t(row) * shape_.vocab_size;
  float* maxima = logit_maxima(row);
  if (!step_.logit_rows || exchange_) kernels().sampling->block_maxima(logits, shape_.vocab_size, maxima);
  step_.tokens[row] =
      scratch_[tile.thread]->chooser.choose(*step_.sampling, row, logits, maxima);
}

}  // namespace engine
