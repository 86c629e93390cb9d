// What the next attention reads, fetched while products are computed.
//
// A step of many sequences spends its time in products, which hardly read any memory, and in attention, which
// waits for memory: each layer's keys and values are read once a step. So they are fetched into the last cache
// during the products before.
#include <unistd.h>

#include <algorithm>

#include "program.h"

namespace engine {

ptrdiff_t last_cache_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  static const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? bytes : 0;
#else
  return 0;
#endif
}

void Program::make_runs() {
  for (RunList& list : run_lists_) list.is_made = false;
  for (const Op& op : ops_) {
    if (op.kind != OpKind::attention) continue;
    auto list = runs_of(op);
    if (list == run_lists_.end()) list = run_lists_.insert(list, {op.group, op.attention.window, false, {}});
    if (list->is_made) continue;
    list->is_made = true;
    if (int(list->pieces.size()) < num_pieces_) list->pieces.resize(num_pieces_);
    for (int piece = 0; piece < num_pieces_; piece++) add_runs(list->pieces[piece], op, piece);
  }
}

std::deque<Program::RunList>::iterator Program::runs_of(const Op& op) {
  return std::find_if(run_lists_.begin(), run_lists_.end(), [&](const RunList& list) {
    return list.group == op.group && list.window == op.attention.window;
  });
}

// Of the tasks of a single token, whose keys nobody else reads.
void Program::add_runs(PieceRuns& runs, const Op& op, int piece) {
  // More would displace what was fetched before.
  const ptrdiff_t bytes = 2 * kv_.head_bytes(), most = last_cache_bytes() / 2 / pool_.num_threads();
  runs.runs.clear();
  runs.bytes = 0;
  find_tasks(op.attention.window, first_row(piece), first_row(piece + 1), found_tasks_);
  for (const Task& each : found_tasks_) {
    const AttentionTask task = attention_task(op, each);
    if (task.num_tokens > 1) continue;
    // Of a block of which little is used, little is read.
    const int end = (task.position + 1 + kv_.block_size / 2) / kv_.block_size;
    for (int block = first_key(task.position, op.attention.window) / kv_.block_size; block < end; block++) {
      if (runs.bytes >= most) return;
      runs.runs.push_back({ptrdiff_t(kv_.key_offset(task.blocks[block], task.kv_head)), bytes});
      runs.bytes += bytes;
    }
  }
}

// What `next` reads, at a rate that brings it all by the end of what comes before.
Readahead Program::readahead_for(const PieceSegment& next) {
  const int segment = next.segment, piece = next.piece;
  if (segment == 0 || segment >= int(segments_.size())) return {};
  const Op& op = ops_[segments_[segment].first_op];
  const PieceRuns& runs = runs_of(op)->pieces[piece];
  const int row_blocks = (first_row(piece + 1) - first_row(piece) + kReadaheadRows - 1) / kReadaheadRows;
  const int64_t steps = std::max<int64_t>(segments_[segment].weights / kReadaheadWeights * row_blocks, 1);
  const int lines = int(std::min<int64_t>(runs.bytes / kLineBytes / steps + 1, Readahead::kMostLines));
  return {step_.kv_caches[op.layer], runs.runs.data(), runs.runs.data() + runs.runs.size(), lines};
}

}  // namespace engine
