// What is stored at the end of a segment and what the next attention reads, fetched while products are computed.
//
// A step of many sequences spends its time in products, which hardly read any memory, and in attention, which
// waits for memory: each layer's keys and values are read once a step, and are not in the caches when new ones are
// stored beside them. So they are fetched during the products before, on processors whose last cache takes all that
// leaves the second one.
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "program/program.h"

namespace engine {

namespace {

// Intel's last cache need not take what was fetched and not read yet, and memory that is being fetched holds up
// products there: it cost more than it gave.
bool reads_ahead() {
#if defined(__x86_64__)
  static const bool is_amd = __builtin_cpu_is("amd");
  return is_amd;
#else
  return true;
#endif
}

// On AMD's processors sysconf gives the sum of all chips' caches, of which a core has but one.
ptrdiff_t find_last_cache_bytes() {
  for (int index = 4; index >= 0; index--) {
    char path[64];
    std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
    std::FILE* file = std::fopen(path, "r");
    if (file == nullptr) continue;
    long kib = 0;
    const int found = std::fscanf(file, "%ldK", &kib);
    std::fclose(file);
    if (found == 1 && kib > 0) return ptrdiff_t(kib) << 10;
  }
#if defined(_SC_LEVEL3_CACHE_SIZE)
  return std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), 0L);
#else
  return 0;
#endif
}

}  // namespace

ptrdiff_t last_cache_bytes() {
  static const ptrdiff_t bytes = find_last_cache_bytes();
  return bytes;
}

void Program::make_runs() {
  if (!reads_ahead()) return;
  for (RunList& list : run_lists_) list.is_made = false;
  for (const Op& op : ops_) {
    if (op.kind != OpKind::attention) continue;
    auto list = runs_of(op);
    if (list == run_lists_.end()) list = run_lists_.insert(list, {op.group, op.attention.window, false, {}});
    if (list->is_made) continue;
    list->is_made = true;
    if (int(list->pieces.size()) < num_pieces_) list->pieces.resize(num_pieces_);
    for (int piece = 0; piece < num_pieces_; piece++) {
      PieceRuns& runs = list->pieces[piece];
      find_stored(runs.stored, op, first_row(piece), first_row(piece + 1));
      find_attended(runs.attended, op, first_row(piece), first_row(piece + 1));
    }
  }
}

std::deque<Program::RunList>::iterator Program::runs_of(const Op& op) {
  return std::find_if(run_lists_.begin(), run_lists_.end(), [&](const RunList& list) {
    return list.group == op.group && list.window == op.attention.window;
  });
}

// Of the blocks that rows are stored in, what attention reads as well.
void Program::find_stored(FoundRuns& runs, const Op& op, int first_row, int end_row) const {
  runs.runs.clear();
  runs.bytes = 0;
  const int32_t* slots = step_.groups[op.group].slot_mapping + first_token_;
  for (int row = first_row; row < end_row; row++) {
    const int block = slots[row] / kv_.block_size, used = slots[row] % kv_.block_size + 1;
    if (row + 1 < end_row && slots[row + 1] / kv_.block_size == block) continue;
    const ptrdiff_t bytes = kv_.head_bytes() + kv_.head_bytes() * used / kv_.block_size;
    for (int g = 0; g < kv_.num_kv_heads; g++) {
      runs.runs.push_back({ptrdiff_t(kv_.key_offset(block, g)), bytes});
      runs.bytes += bytes;
    }
  }
}

// Of tasks of a single token, whose keys no other row reads, the blocks before the one that it is stored in.
void Program::find_attended(FoundRuns& runs, const Op& op, int first_row, int end_row) {
  // More would displace what was fetched before.
  const ptrdiff_t bytes = 2 * kv_.head_bytes(), most = last_cache_bytes() / 2 / pool_.num_threads();
  runs.runs.clear();
  runs.bytes = 0;
  find_tasks(op.attention.window, first_row, end_row, found_tasks_);
  for (const Task& each : found_tasks_) {
    const AttentionTask task = attention_task(op, each);
    if (task.num_tokens > 1) continue;
    const int end = task.position / kv_.block_size;
    for (int block = first_key(task.position, op.attention.window) / kv_.block_size; block < end; block++) {
      if (runs.bytes >= most) return;
      runs.runs.push_back({ptrdiff_t(kv_.key_offset(task.blocks[block], task.kv_head)), bytes});
      runs.bytes += bytes;
    }
  }
}

// What the thread's next attention reads, then what the piece stores at the end of its segment, at a rate that brings
// it all by then.
Readahead Program::readahead_for(const PieceSegment& at) {
  if (!reads_ahead()) return {};
  ptrdiff_t bytes = 0;
  const auto runs_before = [&](int segment, int piece, FoundRuns PieceRuns::*which) -> Runs {
    if (segment == 0 || segment >= int(segments_.size())) return {};
    const Op& op = ops_[segments_[segment].first_op];
    const FoundRuns& found = runs_of(op)->pieces[piece].*which;
    bytes += found.bytes;
    return {step_.kv_caches[op.layer], found.runs.data(), found.runs.data() + found.runs.size()};
  };
  const PieceSegment next = pieces_.after(at);
  const Runs attended =
      is_needed(next) ? runs_before(next.segment, next.piece, &PieceRuns::attended) : Runs{};
  const Runs stored = runs_before(at.segment + 1, at.piece, &PieceRuns::stored);
  const int row_blocks = (first_row(at.piece + 1) - first_row(at.piece) + kReadaheadRows - 1) / kReadaheadRows;
  const int64_t steps = std::max<int64_t>(segments_[at.segment].weights / kReadaheadWeights * row_blocks, 1);
  const int lines = int(std::min<int64_t>(bytes / kLineBytes / steps + 1, Readahead::kMostLines));
  return {attended, stored, lines};
}

}  // namespace engine
