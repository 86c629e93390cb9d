#include "program/program.h"

#include <algorithm>
#include <cstring>

#include "isa/isa.h"

namespace engine {

namespace {

// The maximum number of rows for which memory is kept. A sequence that is computed as a whole may be much longer than
// most.
constexpr int kMostKeptRows = 4096;

}  // namespace

Model::Model(const ModelShape& shape)
    : shape(shape),
      largest_kv(kv_layout(shape.num_kv_heads, shape.head_dim)),
      attention(kernels().attention[int(shape.kv_format)]),
      rows(*kernels().rows) {}

void Model::norm(const float* weight, const float* bias, float eps, const float* x, float* out) const {
  if (shape.norm == NormKind::layer) return rows.layer_norm(x, weight, bias, eps, shape.hidden_size, out);
  const int size = shape.hidden_size / shape.norm_groups;
  for (int i = 0; i < shape.hidden_size; i += size) rows.rms_norm(x + i, weight + i, eps, size, out + i);
}

Program::Program(const ModelShape& shape)
    : pool_(shape.num_threads),
      model_(shape),
      rows_(shape),
      ranks_(model_),
      products_(model_, ranks_, pool_.num_threads()),
      experts_(model_, ranks_, products_, pool_.num_threads()),
      latent_(model_),
      inputs_(model_, ranks_, slice_),
      streams_(model_),
      attention_(model_, ranks_, ropes_, slice_, pool_.num_threads()),
      mixers_(model_, ranks_, slice_, pool_.num_threads()),
      ngrams_(model_, ranks_, slice_, inputs_, mixers_),
      pieces_(model_, slice_, pool_.num_threads()),
      readahead_(model_, slice_, attention_, pieces_, pool_.num_threads()),
      head_(model_, products_, ranks_),
      decode_(model_.shape),
      profile_(pool_.num_threads()) {
  const int max_rows = std::max(kTaskRows, model_.most_heads_per_kv_head());
  for (int i = 0; i < pool_.num_threads(); i++) scratch_.push_back(std::make_unique<Scratch>(max_rows, model_));
}

void Program::add(const Op& op) {
  model_.ops.push_back(op);
  row_tiles_.push_back(0);
  const size_t gate_rank = op.norm_gate ? op.norm_gate->rank : 0;
  const size_t low_rank_size = std::max(size_t(op.adapter_rank), gate_rank);
  const auto widen = [&](Rows& rows) {
    rows.widen_low_rank(low_rank_size);
    rows.widen_kept(streams_.kept_size(op));
    if (op.kind == OpKind::add_shortcut) rows.keep_shortcuts();
  };
  widen(rows_);
  for (std::unique_ptr<Scratch>& scratch : scratch_) widen(scratch->rows);
  products_.add_op(op);
  experts_.add_op(op);
  attention_.add_op(op);
  mixers_.add_op(op);
  pieces_.add_op();
  profile_.add_op();
  // Rows store data for later tokens before attention, and in mixers.
  if (op.kind == OpKind::rotate_store && op.num_stored && !op.reads_source) first_unneeded_ = int(model_.ops.size());
  if (op.kind == OpKind::summarize_group || op.kind == OpKind::store_entries) first_unneeded_ = int(model_.ops.size());
  if (op.kind == OpKind::average_group || op.kind == OpKind::convolve_ngrams) first_unneeded_ = int(model_.ops.size());
  if (op.kind == OpKind::short_convolution || op.kind == OpKind::scan) first_unneeded_ = int(model_.ops.size());
  if (op.kind == OpKind::convolve_inside) first_unneeded_ = int(model_.ops.size());
  if (op.kind == OpKind::rotate_store && model_.kv(op).layer_bytes() != size_t(model_.shape.block_bytes))
    shares_blocks_ = true;
  shares_blocks_ |= op.mixer != nullptr;
  keeps_states_ |= op.kind == OpKind::add_kept;
}

void Program::join_experts(const ExpertExchange& exchange) {
  exchange_ = exchange;
  experts_.join(exchange_);
  // Ranks meet even in the last layer.
  first_unneeded_ = int(model_.ops.size());
}

void Program::join_round() {
  is_guest_ = true;
  num_slices_ = 1;
  slice_.step = Step{};
  slice_.num_tokens = 0;
  profile_.begin_step();
  pool_.run(*this);
  is_guest_ = false;
}

bool Program::run(const Step& step) {
  for (int i = 0; i < step.num_tokens; i++)
    if (step.input_ids[i] < 0 || step.input_ids[i] >= model_.shape.vocab_size) return false;
  slice_.step = step;
  slice_.first_sequence = 0;
  skips_optional_ = !slice_.has_any_source();
  num_slices_ = slice_.divide_step(model_.shape.is_bidirectional);
  const int rows = slice_.most_tokens();
  rows_.reserve(rows);
  ropes_.reserve(rows);
  attention_.reserve(rows);
  inputs_.reserve(rows);
  experts_.reserve(rows);
  pieces_.begin_step(first_unneeded_);
  head_.begin_step(slice_.step);
  profile_.begin_step();
  pool_.run(*this);
  first_phase_ += uint64_t(head_phase()) + 2;
  if (rows > kMostKeptRows) {
    rows_.release();
    products_.release();
    attention_.release();
  }
  return true;
}

int Program::decode(const DecodeBatch& batch) {
  if (!decode_.lay_out(batch)) return -1;
  run(decode_.step(batch));
  return batch.chooses_later ? 0 : decode_.advance(batch);
}

int Program::choose(const DecodeBatch& batch) {
  run(decode_.choice(batch, head_.logits()));
  return decode_.advance(batch);
}

int Program::begin(int phase) {
  profile_.end_op();
  if (experts_.have_failed()) return -1;
  if (phase < head_phase()) {
    const int op = phase % ops_of_slice();
    if (is_guest_) {
      profile_.begin_op(op);
      return begin_guest_op(model_.ops[op]);
    }
    if (op == 0) begin_slice(phase / ops_of_slice());
    // The pieces pass through all operations but the first ones, in a single phase.
    if (op >= pieces_.first_op() && pieces_.count()) {
      profile_.begin_op(Profile::kNoOp);
      return op == pieces_.first_op() ? pool_.num_threads() : 0;
    }
    const bool skips = is_skipped(model_.ops[op]);
    profile_.begin_op(skips ? Profile::kNoOp : op);
    if (skips || (op >= first_unneeded_ && !slice_.is_wanted(0, slice_.num_tokens))) return 0;
    return begin_op(model_.ops[op]);
  }
  if (is_guest_) return -1;
  const Step& step = slice_.step;
  if (phase == head_phase() && step.num_logit_rows) {
    profile_.begin_op(ops_of_slice());
    return step.logit_rows ? head_.begin_product(step) : 0;
  }
  profile_.begin_op(ops_of_slice() + 1);
  const int tiles = phase > head_phase() + 1 ? 0 : head_.begin_choice(step);
  return tiles ? tiles : -1;
}

void Program::run_tile(int phase, Tile& tile) {
  Scratch& scratch = *scratch_[tile.thread];
  if (phase == head_phase()) return head_.run_product(slice_.step, tile, scratch);
  if (phase > head_phase()) return head_.choose(slice_.step, tile, scratch);
  const int index = phase % ops_of_slice();
  if (!is_guest_ && index >= pieces_.first_op() && pieces_.count()) return run_pieces(tile);
  const Op& op = model_.ops[index];
  switch (op.kind) {
    case OpKind::linear:
      return products_.run_linear(op, tile, {tile.thread, first_phase_ + phase, slice_.num_tokens}, rows_, scratch);
    case OpKind::gated_linear:
      return products_.run_gated(op, tile, {tile.thread, first_phase_ + phase, slice_.num_tokens}, rows_, scratch);
    case OpKind::gated_experts:
      return experts_.run_gated(op, tile, rows_, scratch);
    case OpKind::expert_outputs:
      return experts_.run_output(op, tile, scratch);
    case OpKind::attention:
      return attention_.run(op, tile, rows_, scratch);
    case OpKind::choose_keys:
      return attention_.choose(op, tile, rows_, scratch);
    case OpKind::short_convolution:
    case OpKind::convolve:
    case OpKind::convolve_ngrams:
    case OpKind::convolve_inside:
    case OpKind::convolve_heads:
    case OpKind::scan:
      return mixers_.run(op, tile, rows_, scratch.mixing);
    case OpKind::latent_queries:
    case OpKind::latent_values:
      return latent_.run(op, tile, slice_.num_tokens, rows_, scratch);
    default:
      return run_rows(op, tile);
  }
}

// Other threads may still compute tiles of the previous slice that were already written, and read data that changes
// here. So wait for them first.
void Program::begin_slice(int index) {
  pool_.wait_for_others();
  if (index && experts_.are_exchanged()) exchange_.begin_round();
  slice_.begin(index);
  products_.begin_slice(slice_.step.adapters ? slice_.step.adapters + slice_.first_token : nullptr, slice_.num_tokens);
  attention_.begin_slice();
  mixers_.begin_slice();
  if (shares_blocks_) clear_new_blocks();
  pieces_.begin_slice(ranks_.are_several() || experts_.are_any() || mixers_.are_any() ||
                      model_.shape.is_bidirectional || model_.shape.is_compressed || model_.shape.index_dim ||
                      slice_.step.visible ||
                      // A piece may be computed twice, but states must be replaced once.
                      keeps_states_);
  if (pieces_.count()) readahead_.begin_slice();
}

// Blocks may have held a state, or keys and values of layers with other heads, whose bits can be a NaN or infinity when
// read as keys and values. Attention multiplies the unused part of a block by 0, so it must be cleared.
void Program::clear_new_blocks() {
  const size_t block_bytes = model_.shape.block_bytes;
  for (const Op& op : model_.ops) {
    if (op.kind != OpKind::rotate_store || !op.num_stored) continue;
    const int32_t* slots = slice_.step.groups[op.group].slot_mapping + slice_.first_token;
    for (int row = 0; row < slice_.num_tokens; row++)
      if (slots[row] % model_.shape.block_size == 0)
        std::memset(slice_.step.kv_caches[op.layer] + slots[row] / model_.shape.block_size * block_bytes, 0,
                    model_.kv(op).layer_bytes());
  }
}

int Program::begin_op(const Op& op) {
  switch (op.kind) {
    case OpKind::linear:
      return products_.begin(op, slice_.num_tokens, op.num_parts);
    case OpKind::gated_linear:
      return products_.begin(op, slice_.num_tokens, 1);
    case OpKind::attention:
      return attention_.begin(op);
    case OpKind::choose_keys:
      return attention_.begin_choice(op);
    case OpKind::short_convolution:
    case OpKind::convolve:
    case OpKind::convolve_ngrams:
    case OpKind::convolve_inside:
    case OpKind::convolve_heads:
    case OpKind::scan:
      return mixers_.begin(op, rows_);
    case OpKind::quantize:
      return share_rows(op, model_.shape.hidden_size * (1 + (op.norm_gate ? op.norm_gate->rank : 0)));
    case OpKind::share_squares:
      return share_rows(op, model_.shape.mixed_size);
    case OpKind::gate_mixed:
      if (op.target == LinearTarget::part) ranks_.meet();
      return share_rows(op, model_.shape.mixed_size);
    case OpKind::sparse_gates:
      if (op.target == LinearTarget::part) ranks_.meet();
      return share_rows(op, 2 * op.num_columns);
    case OpKind::norm_activations:
      if (op.target == LinearTarget::part) ranks_.meet();
      return share_rows(op, op.num_columns);
    case OpKind::share_gates:
    case OpKind::norm_columns:
    case OpKind::share_activation_squares:
    case OpKind::quantize_inputs:
    case OpKind::gate_by_inputs:
    case OpKind::clamp:
      return share_rows(op, op.num_columns);
    case OpKind::embed_inputs:
    case OpKind::add_inputs:
      return share_rows(op, model_.shape.input_size);
    case OpKind::expand_streams:
    case OpKind::predict_streams:
    case OpKind::correct_streams:
    case OpKind::add_to_streams:
    case OpKind::reduce_streams:
    case OpKind::repeat_streams:
    case OpKind::norm_streams:
    case OpKind::attend_streams:
    case OpKind::copy_streams:
    case OpKind::gate_ngrams:
      return share_rows(op, model_.shape.streams_size());
    case OpKind::mix_streams:
    case OpKind::update_streams:
      return share_rows(op, (op.hyper->num_logits(model_.shape.num_streams) / 4 + 1) * model_.shape.streams_size());
    case OpKind::latent_queries:
    case OpKind::latent_values:
      return latent_.begin(op, slice_.num_tokens);
    case OpKind::gated_experts:
      // The exchange replaces data that threads of an earlier layer may still read, so wait for them.
      if (experts_.are_exchanged()) pool_.wait_for_others();
      return experts_.begin_gated(op, rows_, slice_.num_tokens);
    case OpKind::expert_outputs:
      return experts_.begin_output(op);
    case OpKind::place:
    case OpKind::add_placed:
      return slice_.step.placed ? share_rows(op, model_.shape.hidden_size) : 0;
    case OpKind::combine_experts:
      experts_.begin_combine(op);
      return share_rows(op, op.experts->router.num_chosen * model_.shape.hidden_size);
    case OpKind::summarize_group:
    case OpKind::average_group:
      return share_rows(op, 8 * (model_.shape.index_dim + model_.shape.index_inputs));
    case OpKind::store_entries:
      return share_rows(op, 8 * op.head_dim);
    case OpKind::store_index:
      return share_rows(op, (std::max(op.num_kv_heads, op.choice.num_queries) + 1) * model_.shape.index_dim);
    case OpKind::rotate_heads:
    case OpKind::scale_heads:
      return share_rows(op, op.num_heads * op.head_dim);
    case OpKind::share_head_squares:
    case OpKind::rotate_store:
      if (op.target == LinearTarget::part) ranks_.meet();
      return share_rows(op, (op.num_heads + op.num_stored * op.num_kv_heads) * op.head_dim);
    case OpKind::sum:
      ranks_.meet();
      return share_rows(op, model_.shape.hidden_size);
    default:
      return share_rows(op, model_.shape.hidden_size);
  }
}

// A guest has no rows of its own, so only rows of other ranks pass.
int Program::begin_guest_op(const Op& op) {
  const bool is_experts =
      op.kind == OpKind::gated_experts || op.kind == OpKind::expert_outputs || op.kind == OpKind::combine_experts;
  return is_experts ? begin_op(op) : 0;
}

// Here a tile is a thread's share of the work. It ends when nothing is left for any thread.
void Program::run_pieces(Tile& tile) {
  Scratch& scratch = *scratch_[tile.thread];
  PieceSegment at;
  while (pieces_.queue().take(tile.thread, at)) run_piece(at, tile.thread, scratch);
  tile.commit();
}

void Program::run_piece(const PieceSegment& at, int thread, Scratch& scratch) {
  PieceQueue& queue = pieces_.queue();
  if (!pieces_.is_needed(at)) {
    if (queue.commit(at)) queue.finish(at);
    return;
  }
  const Segment& segment = pieces_.segments()[at.segment];
  const int end_row = pieces_.first_row(at.piece + 1), last_op = segment.end_op - 1;
  Rows& rows = scratch.rows;
  rows.first = pieces_.first_row(at.piece);
  rows.reserve(end_row - rows.first);
  scratch.readahead = readahead_.of(at);
  for (int row = rows.first; row < end_row; row++) rows.copy_streams(rows_, row);
  Profile::Clock::time_point start = Profile::Clock::now();
  for (int op = segment.first_op; op < last_op && queue.is_wanted(at); op++) {
    // The places where keys and values will be stored are prefetched last, so that they are still in the second-level
    // cache then.
    if (op == last_op - 1) scratch.readahead.turn();
    if (is_skipped(model_.ops[op])) continue;
    run_op(model_.ops[op], rows, end_row, thread, scratch);
    const Profile::Clock::time_point now = Profile::Clock::now();
    profile_.add(thread, op, now - start);
    start = now;
  }
  scratch.readahead = {};
  if (!queue.commit(at)) return;
  for (int row = rows.first; row < end_row; row++) rows_.copy_streams(rows, row);
  // The last operation writes data that rows of other pieces read, so it runs after the commit.
  if (!is_skipped(model_.ops[last_op]))
    for (int row = rows.first; row < end_row; row++) run_row(model_.ops[last_op], rows, row);
  queue.finish(at);
  profile_.add(thread, last_op, Profile::Clock::now() - start);
}

void Program::run_op(const Op& op, const Rows& rows, int end_row, int thread, Scratch& scratch) {
  switch (op.kind) {
    case OpKind::attention:
      return attention_.attend_rows(op, rows, end_row, scratch);
    case OpKind::linear:
      return products_.compute_linear(op, rows, end_row, thread, scratch);
    case OpKind::gated_linear:
      return products_.compute_gated(op, rows, end_row, thread, scratch);
    case OpKind::latent_queries:
    case OpKind::latent_values:
      return latent_.compute(op, rows, end_row, scratch);
    default:
      for (int row = rows.first; row < end_row; row++) run_row(op, rows, row);
  }
}

}  // namespace engine
