#include "program/readahead.h"

#include <algorithm>

#include "runtime/last_cache.h"

namespace engine {

namespace {

// Prefetching is faster on CPUs whose last-level cache receives everything that is evicted from the second-level cache.
// On Intel's CPUs it may not receive data that was prefetched but not read yet, and pending prefetches delay products,
// so prefetching cost more than it gained.
bool reads_ahead() {
#if defined(__x86_64__)
  static const bool is_amd = __builtin_cpu_is("amd");
  return is_amd;
#else
  return true;
#endif
}

}  // namespace

template <class Lists>
auto ReadaheadPlan::list_of(Lists& lists, const Op& op) {
  return std::find_if(lists.begin(), lists.end(), [&](const RunList& list) {
    return list.group == op.group && list.window == op.attention.window;
  });
}

void ReadaheadPlan::begin_slice() {
  if (!reads_ahead()) return;
  for (RunList& list : lists_) list.is_made = false;
  for (const Op& op : model_.ops) {
    if (op.kind != OpKind::attention) continue;
    auto list = list_of(lists_, op);
    if (list == lists_.end()) list = lists_.insert(list, {op.group, op.attention.window, false, {}});
    if (list->is_made) continue;
    list->is_made = true;
    if (int(list->pieces.size()) < pieces_.count()) list->pieces.resize(pieces_.count());
    for (int piece = 0; piece < pieces_.count(); piece++) {
      const int first_row = pieces_.first_row(piece), end_row = pieces_.first_row(piece + 1);
      if (!op.reads_source) find_stored(list->pieces[piece].stored, op, first_row, end_row);
      find_attended(list->pieces[piece].attended, op, first_row, end_row);
    }
  }
}

// Prefetch, for each block in which rows are stored: its keys, and its values up to the place that is written, which
// attention reads as well.
void ReadaheadPlan::find_stored(FoundRuns& runs, const Op& op, int first_row, int end_row) const {
  const KVLayout kv = model_.kv(op);
  runs.runs.clear();
  runs.bytes = 0;
  const int32_t* slots = slice_.step.groups[op.group].slot_mapping + slice_.first_token;
  for (int row = first_row; row < end_row; row++) {
    const int block = slots[row] / kv.block_size, used = slots[row] % kv.block_size + 1;
    if (row + 1 < end_row && slots[row + 1] / kv.block_size == block) continue;
    const ptrdiff_t bytes = kv.head_bytes() + (kv.kv_head_bytes() - kv.head_bytes()) * used / kv.block_size;
    for (int g = 0; g < kv.num_kv_heads; g++) {
      runs.runs.push_back({ptrdiff_t(kv.key_offset(block, g)), bytes});
      runs.bytes += bytes;
    }
  }
}

// Tasks of a single token read keys that no other row reads. Prefetch all their blocks before the one in which the
// token itself is stored.
void ReadaheadPlan::find_attended(FoundRuns& runs, const Op& op, int first_row, int end_row) {
  const KVLayout kv = model_.kv(op);
  // Prefetching more than this would evict what was fetched first.
  const ptrdiff_t most = last_cache_bytes() / 2 / num_threads_;
  const ptrdiff_t bytes = kv.kv_head_bytes();
  runs.runs.clear();
  runs.bytes = 0;
  attention_.tasks().find(AttentionTasks::Keys(op), first_row, end_row, found_tasks_);
  for (const AttentionTasks::Task& each : found_tasks_) {
    const AttentionTask task = attention_.kernel_task(op, each);
    if (task.num_tokens > 1) continue;
    const int end = (task.num_keys ? task.num_keys : task.position) / kv.block_size;
    for (int block = first_key(task.position, op.attention.window) / kv.block_size; block < end; block++) {
      if (runs.bytes >= most) return;
      runs.runs.push_back({ptrdiff_t(kv.key_offset(task.blocks[block], task.kv_head)), bytes});
      runs.bytes += bytes;
    }
  }
}

Readahead ReadaheadPlan::of(const PieceSegment& at) const {
  if (!reads_ahead()) return {};
  const std::vector<Segment>& segments = pieces_.segments();
  ptrdiff_t bytes = 0;
  const auto runs_before = [&](int segment, int piece, FoundRuns PieceRuns::* which) -> Runs {
    if (segment == 0 || segment >= int(segments.size())) return {};
    const Op& op = model_.ops[segments[segment].first_op];
    const FoundRuns& found = list_of(lists_, op)->pieces[piece].*which;
    bytes += found.bytes;
    return {slice_.step.kv_caches[op.layer], found.runs.data(), found.runs.data() + found.runs.size()};
  };
  const PieceSegment next = pieces_.queue().after(at);
  const Runs attended = pieces_.is_needed(next) ? runs_before(next.segment, next.piece, &PieceRuns::attended) : Runs{};
  const Runs stored = runs_before(at.segment + 1, at.piece, &PieceRuns::stored);
  const int rows = pieces_.first_row(at.piece + 1) - pieces_.first_row(at.piece);
  const int row_blocks = (rows + kReadaheadRows - 1) / kReadaheadRows;
  const int64_t steps = std::max<int64_t>(segments[at.segment].weights / kReadaheadWeights * row_blocks, 1);
  const int lines = int(std::min<int64_t>(bytes / kLineBytes / steps + 1, Readahead::kMostLines));
  return {attended, stored, lines};
}

}  // namespace engine
