#include "program/pieces.h"

#include <algorithm>

#include "linear/pack.h"
#include "runtime/last_cache.h"

namespace engine {

namespace {

// The number of rows of a piece. With fewer, unpacking weights costs more than pieces save; with more, they are harder
// to balance. If products compute more rows at once, that number is used.
constexpr int kFewestRows = 8, kMostRows = 18;
// Every thread reads all weights. The weights of two layers must fit into the last-level cache, so that they are read
// from memory only once.
constexpr int kLayersInCache = 2;
// The cost of attention to one key, in multiplications of a product.
constexpr int64_t kCostOfKey = 6;

// Returns whether an operation writes data that all layers' rows use. Operations before it do nothing else.
bool makes_first_input(OpKind kind) { return kind == OpKind::add_inputs || kind == OpKind::expand_streams; }

}  // namespace

void Pieces::find_segments() {
  const int end = int(model_.ops.size()) - 1;
  int first = 1;
  for (int i = 1; i < end; i++)
    if (makes_first_input(model_.ops[i].kind)) first = i + 1;
  segments_.push_back({first, end});
  for (int i = first; i < end; i++) {
    const Op& op = model_.ops[i];
    if (op.kind == OpKind::attention) {
      if (!op.reads_source) num_groups_ = std::max(num_groups_, op.group + 1);
      gates_attention_ |= op.first_column != 0;
      segments_.back().end_op = i;
      segments_.push_back({i, end});
    }
    const auto add = [&](const PackedWeight& w) {
      Segment& segment = segments_.back();
      segment.weights += int64_t(w.n) * w.k;
      segment.bytes += packed_bytes(w.format, w.n, w.k, w.group);
      segment.rows_at_once = std::min(segment.rows_at_once, rows_at_once(w.format));
    };
    if (op.kind == OpKind::linear || op.kind == OpKind::gated_linear)
      for (int part = 0; part < op.num_parts; part++) add(*op.parts[part]);
    if (op.heads) std::for_each(op.heads, op.heads + op.num_heads, add);
  }
}

void Pieces::begin_slice(bool must_share) {
  count_ = must_share ? 0 : best_count();
  if (count_) queue_.begin(count_, int(segments_.size()), num_threads_, reads_own_keys());
}

// Returns 0 if pieces would not be faster, or if one piece takes so long that the other threads would wait for it.
int Pieces::best_count() const {
  const int num_tokens = slice_.num_tokens;
  // The gates are in the projection of the previous segment, which another thread may have computed.
  if (gates_attention_) return 0;
  if (segments_.size() < 3 || num_tokens < kFewestRows * num_threads_) return 0;
  if (kLayersInCache * segments_[1].bytes > last_cache_bytes() / 2) return 0;
  const int rows_of_round = std::max(kMostRows, segments_[1].rows_at_once) * num_threads_;
  const int pieces = (num_tokens + rows_of_round - 1) / rows_of_round * num_threads_;
  const int64_t cost_of_key = kCostOfKey * 2 * model_.shape.num_heads * model_.shape.head_dim;
  int64_t total = 0, most = 0;
  for (int piece = 0, row = 0; piece < pieces; piece++) {
    int64_t cost = 0;
    for (const int end = int(int64_t(num_tokens) * (piece + 1) / pieces); row < end; row++)
      cost += segments_[1].weights + cost_of_key * slice_.step.positions[slice_.first_token + row];
    total += cost;
    most = std::max(most, cost);
  }
  return most * num_threads_ * 4 <= total * 5 ? pieces : 0;
}

// Returns whether rows of the slice read keys that other rows of the slice store: in the same chunk of a prompt, or in
// a cached block that another request fills in this very step. The request that reads such a block comes after the one
// that fills it, and its first row begins a new block.
bool Pieces::reads_own_keys() {
  const Step& step = slice_.step;
  const int block_size = model_.shape.block_size;
  const int32_t *starts = step.query_start_loc, end_token = slice_.first_token + slice_.num_tokens;
  int end_sequence = slice_.first_sequence;
  for (; end_sequence < step.num_sequences && starts[end_sequence] < end_token; end_sequence++)
    if (starts[end_sequence + 1] - starts[end_sequence] > 1) return true;
  for (int g = 0; g < num_groups_; g++) {
    const StepGroup& group = step.groups[g];
    filled_blocks_.clear();
    for (int token = slice_.first_token; token < end_token; token++)
      if (group.slot_mapping[token] % block_size == block_size - 1)
        filled_blocks_.push_back(group.slot_mapping[token] / block_size);
    if (filled_blocks_.empty()) continue;
    const auto is_filled = [&](int32_t block) {
      return std::find(filled_blocks_.begin(), filled_blocks_.end(), block) != filled_blocks_.end();
    };
    for (int s = slice_.first_sequence; s < end_sequence; s++) {
      const int position = step.positions[starts[s]];
      const int32_t* blocks = group.block_table + slice_.table_row(s) * group.block_table_stride;
      if (position % block_size == 0 && std::any_of(blocks, blocks + position / block_size, is_filled)) return true;
    }
  }
  return false;
}

bool Pieces::is_needed(const PieceSegment& at) const {
  const bool is_past_end = at.segment >= int(segments_.size());
  return (!is_past_end && segments_[at.segment].first_op < first_unneeded_) ||
         slice_.is_wanted(first_row(at.piece), first_row(at.piece + 1));
}

}  // namespace engine
