// Long steps by pieces: rows of a slice, which one thread takes from one layer's attention to the next one's.
//
// What is between two operations stays in the thread's own caches, and what the next attention reads is fetched there.
// Threads do not wait for each other between operations, nor between layers where rows do not need each other's keys.
#include <algorithm>

#include "linear/pack.h"
#include "program/program.h"

namespace engine {

namespace {

// Rows of a piece: fewer would cost more in unpacking weights than they save, more are slower to balance. But as many
// as products take at once are no slower than these.
constexpr int kFewestRows = 8, kMostRows = 18;
// Each thread reads all weights: those of two layers must fit into the last cache, to come from memory once.
constexpr int kLayersInCache = 2;

// The columns of a product whose sums fit into a thread's memory.
int widest_product(int rows) { return std::max(kTileFloats / rows / 64 * 64, 64); }

// What a key costs in attention, in multiplications of a product.
constexpr int64_t kCostOfKey = 6;

}  // namespace

void Program::find_segments() {
  const int end = int(ops_.size()) - 1;
  segments_.push_back({1, end});
  for (int op = 1; op < end; op++) {
    if (ops_[op].kind == OpKind::attention) {
      num_groups_ = std::max(num_groups_, ops_[op].group + 1);
      segments_.back().end_op = op;
      segments_.push_back({op, end});
    }
    if (ops_[op].kind == OpKind::linear || ops_[op].kind == OpKind::gated_linear)
      for (int i = 0; i < ops_[op].num_parts; i++) {
        const PackedWeight& w = *ops_[op].parts[i];
        Segment& segment = segments_.back();
        segment.weights += int64_t(w.n) * w.k;
        segment.bytes += packed_bytes(w.format, w.n, w.k);
        segment.rows_at_once = std::min(segment.rows_at_once, rows_at_once(w.format));
      }
  }
}

// None where they do not pay, or where a long one would make the other threads wait.
int Program::count_pieces() const {
  const int num_threads = pool_.num_threads();
  if (exchange_ || segments_.size() < 3 || num_tokens_ < kFewestRows * num_threads) return 0;
  if (kLayersInCache * segments_[1].bytes > last_cache_bytes() / 2) return 0;
  const int rows_of_round = std::max(kMostRows, segments_[1].rows_at_once) * num_threads;
  const int pieces = (num_tokens_ + rows_of_round - 1) / rows_of_round * num_threads;
  const int64_t cost_of_key = kCostOfKey * 2 * shape_.num_heads * shape_.head_dim;
  int64_t total = 0, most = 0;
  for (int piece = 0, row = 0; piece < pieces; piece++) {
    int64_t cost = 0;
    for (const int end = int(int64_t(num_tokens_) * (piece + 1) / pieces); row < end; row++)
      cost += segments_[1].weights + cost_of_key * step_.positions[first_token_ + row];
    total += cost;
    most = std::max(most, cost);
  }
  return most * num_threads * 4 <= total * 5 ? pieces : 0;
}

// Whether keys of the slice are read by other rows of it: by those of the same chunk, or by a request with a cached
// block that another request fills in this very step. Such a request comes after it, and begins with a new block.
bool Program::reads_own_keys() {
  const int32_t *starts = step_.query_start_loc, end_token = first_token_ + num_tokens_;
  int end_sequence = first_sequence_;
  for (; end_sequence < step_.num_sequences && starts[end_sequence] < end_token; end_sequence++)
    if (starts[end_sequence + 1] - starts[end_sequence] > 1) return true;
  for (int g = 0; g < num_groups_; g++) {
    const StepGroup& group = step_.groups[g];
    filled_blocks_.clear();
    for (int token = first_token_; token < end_token; token++)
      if (group.slot_mapping[token] % kv_.block_size == kv_.block_size - 1)
        filled_blocks_.push_back(group.slot_mapping[token] / kv_.block_size);
    if (filled_blocks_.empty()) continue;
    const auto is_filled = [&](int32_t block) {
      return std::find(filled_blocks_.begin(), filled_blocks_.end(), block) != filled_blocks_.end();
    };
    for (int s = first_sequence_; s < end_sequence; s++) {
      const int position = step_.positions[starts[s]];
      const int64_t table_row = step_.table_rows ? step_.table_rows[s] : s;
      const int32_t* blocks = group.block_table + table_row * group.block_table_stride;
      if (position % kv_.block_size == 0 && std::any_of(blocks, blocks + position / kv_.block_size, is_filled))
        return true;
    }
  }
  return false;
}

bool Program::is_needed(const PieceSegment& at) const {
  return at.segment + 1 < int(segments_.size()) || is_wanted(first_row(at.piece), first_row(at.piece + 1));
}

// A tile is a thread's share in the work: it ends when nothing is left of it.
void Program::run_pieces(Tile& tile) {
  Scratch& scratch = *scratch_[tile.thread];
  PieceSegment at;
  while (pieces_.take(tile.thread, at)) run_piece(at, scratch);
  tile.commit();
}

void Program::run_piece(const PieceSegment& at, Scratch& scratch) {
  using Clock = std::chrono::steady_clock;
  if (!is_needed(at)) {
    if (pieces_.commit(at)) pieces_.finish(at);
    return;
  }
  const Segment& segment = segments_[at.segment];
  const int end_row = first_row(at.piece + 1), last_op = segment.end_op - 1;
  Rows& rows = scratch.rows;
  rows.first = first_row(at.piece);
  rows.reserve(end_row - rows.first);
  scratch.readahead = readahead_for(at);
  std::copy(slice_rows_.residual(rows.first), slice_rows_.residual(end_row), rows.residual(rows.first));
  Clock::time_point start = Clock::now();
  for (int op = segment.first_op; op < last_op && pieces_.is_wanted(at); op++) {
    // What is stored is fetched last, to be still in the second cache.
    if (op == last_op - 1) scratch.readahead.turn();
    run_op(ops_[op], rows, end_row, scratch);
    const Clock::time_point now = Clock::now();
    scratch.profile[op] += std::chrono::duration<double>(now - start).count();
    start = now;
  }
  scratch.readahead = {};
  if (!pieces_.commit(at)) return;
  std::copy(rows.residual(rows.first), rows.residual(end_row), slice_rows_.residual(rows.first));
  // The operation that other rows read from.
  for (int row = rows.first; row < end_row; row++) run_row(ops_[last_op], rows, row);
  pieces_.finish(at);
  scratch.profile[last_op] += std::chrono::duration<double>(Clock::now() - start).count();
}

void Program::run_op(const Op& op, const Rows& rows, int end_row, Scratch& scratch) {
  const int num_rows = end_row - rows.first;
  const auto for_columns = [&](int part, auto run) {
    const int width = widest_product(num_rows), n = op.parts[part]->n;
    for (int begin = 0; begin < n; begin += width)
      run(Columns{rows.first, num_rows, part, begin, std::min(begin + width, n)});
  };
  switch (op.kind) {
    case OpKind::attention:
      return attend_rows(op, rows, end_row, scratch);
    case OpKind::linear:
      for (int part = 0; part < op.num_parts; part++)
        for_columns(part, [&](const Columns& columns) {
          write_product(op, rows, columns, product(op, rows, columns, scratch));
        });
      return;
    case OpKind::gated_linear:
      return for_columns(0, [&](const Columns& columns) {
        write_gated(op, rows, columns, gated_product(op, rows, columns, scratch));
      });
    default:
      for (int row = rows.first; row < end_row; row++) run_row(op, rows, row);
  }
}

}  // namespace engine
