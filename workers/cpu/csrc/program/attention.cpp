// How a program shares out its attention.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "program/program.h"

namespace engine {

namespace {

constexpr int kMaxTasksOfTile = 16;

}  // namespace

void Program::norm_heads(const Op& op, float* heads, int num_heads, const float* weight) {
  if (op.qk_norm == QKNorm::full)
    return rows_.rms_norm(heads, weight, op.eps, num_heads * shape_.head_dim, heads);
  for (int h = 0; h < num_heads; h++, heads += shape_.head_dim)
    rows_.rms_norm(heads, weight, op.eps, shape_.head_dim, heads);
}

void Program::rotate_store(const Op& op, float* qkv, int row) {
  const int num_heads = shape_.num_heads, num_kv_heads = shape_.num_kv_heads, head_dim = shape_.head_dim;
  float* keys = qkv + num_heads * head_dim;
  const float* values = keys + num_kv_heads * head_dim;
  if (op.qk_norm != QKNorm::none) {
    norm_heads(op, qkv, num_heads, op.vectors[0]);
    norm_heads(op, keys, num_kv_heads, op.vectors[1]);
  }
  if (op.rope >= 0) {
    const Rope& rope = ropes_[op.rope];
    const int half = int(rope.inverse_frequencies.size());
    const float* cosines = rope.tables.data() + size_t(row) * 2 * half;
    rows_.rotate(qkv, num_heads + num_kv_heads, head_dim, cosines, cosines + half, half);
  }
  // What is stored is finite whatever is given: that a key or a value was not, this token's own result must tell.
  if (!rows_.all_finite(qkv, qkv_size_)) std::fill_n(qkv, num_heads * head_dim, std::nanf(""));
  const int heads = num_heads / num_kv_heads;
  const int slot = step_.groups[op.group].slot_mapping[first_token_ + row];
  for (int g = 0; g < num_kv_heads; g++) {
    attention_.convert_queries(kv_, op.attention, qkv + g * heads * head_dim, heads, queries(g, row));
    attention_.store(kv_, step_.kv_caches[op.layer], slot / kv_.block_size, slot % kv_.block_size, g,
                     keys + g * head_dim, values + g * head_dim);
  }
}

uint32_t* Program::queries(int kv_head, int row) const {
  const size_t words = size_t(shape_.num_heads / shape_.num_kv_heads) * attention_.query_words(kv_);
  return reinterpret_cast<uint32_t*>(queries_.bytes()) + (size_t(kv_head) * num_tokens_ + row) * words;
}

int Program::begin_attention(const Op& op, Shares& shares) {
  const TaskList& list = tasks_of(op);
  shares.tasks = &list;
  if (list.num_slots) {
    partial_.reserve(list.num_slots * partial_floats() * sizeof(float));
    if (size_t(list.num_slots) > num_finished_slots_) {
      num_finished_slots_ = list.num_slots;
      finished_slots_.reset(new std::atomic<int>[num_finished_slots_]);
    }
    for (int i = 0; i < list.num_slots; i++) finished_slots_[i].store(0);
  }
  return int(list.first_tasks.size()) - 1;
}

size_t Program::partial_floats() const {
  return size_t(shape_.num_heads / shape_.num_kv_heads) * (kv_.padded_head_dim() + 32);
}

AttentionState Program::partial_state(float* floats) const {
  const int rows = shape_.num_heads / shape_.num_kv_heads;
  return {floats, floats + 16 * rows, floats + 32 * rows};
}

AttentionTask Program::attention_task(const Op& op, const Task& task) const {
  const int heads = shape_.num_heads / shape_.num_kv_heads;
  const StepGroup& group = step_.groups[op.group];
  const int64_t table_row = step_.table_rows ? step_.table_rows[task.sequence] : task.sequence;
  return {
      queries(task.kv_head, task.token),
      step_.positions[first_token_ + task.token],
      task.num_tokens,
      heads,
      task.kv_head,
      task.first_partition,
      task.last_partition,
      group.block_table + table_row * group.block_table_stride,
      step_.kv_caches[op.layer],
      nullptr,
  };
}

// Results stay with the thread until the tile is committed: activations, or the state of a partition.
void Program::run_attention(const Op& op, const Shares& shares, Tile& tile) {
  const TaskList& list = *shares.tasks;
  const int begin = list.first_tasks[tile.index], count = list.first_tasks[tile.index + 1] - begin;
  Scratch& scratch = *scratch_[tile.thread];
  AttentionTask tasks[kMaxTasksOfTile] = {};
  uint8_t* results[kMaxTasksOfTile];
  size_t bytes = 0;
  for (int i = 0; i < count; i++) {
    tasks[i] = attention_task(op, list.tasks[begin + i]);
    if (i) tasks[i - 1].next = &tasks[i];
    bytes += result_bytes(op, list.tasks[begin + i]);
  }
  scratch.results.reserve(bytes);
  attention_.fetch(kv_, op.attention, tasks[0]);
  uint8_t* result = scratch.results.bytes();
  for (int i = 0; i < count; i++) {
    results[i] = result;
    attend(op, list.tasks[begin + i], tasks[i], scratch, result);
    result += result_bytes(op, list.tasks[begin + i]);
  }
  if (!tile.commit()) return;
  for (int i = 0; i < count; i++) write_attention(op, list.tasks[begin + i], results[i], scratch);
}

size_t Program::result_bytes(const Op& op, const Task& task) const {
  if (task.num_slots > 1) return partial_floats() * sizeof(float);
  const int columns = shape_.num_heads / shape_.num_kv_heads * shape_.head_dim;
  return (task.num_tokens * activation_row_bytes(op.activation_kind, columns) + 63) / 64 * 64;
}

void Program::attend(const Op& op, const Task& task, const AttentionTask& attention, Scratch& scratch,
                     uint8_t* result) {
  if (task.num_slots > 1)
    return attention_.attend(kv_, op.attention, attention, scratch.attention,
                             partial_state(reinterpret_cast<float*>(result)));
  attention_.attend(kv_, op.attention, attention, scratch.attention, scratch.attention.total);
  finish_attention(op, task, scratch.attention.total, scratch, result);
}

// The activations of a task's tokens, from the state of all their keys.
void Program::finish_attention(const Op& op, const Task& task, const AttentionState& total, Scratch& scratch,
                               uint8_t* activations) {
  const int heads = shape_.num_heads / shape_.num_kv_heads, columns = heads * shape_.head_dim;
  float* out = scratch.tile.get();
  attention_.finish(total, task.num_tokens * heads, shape_.head_dim, out);
  const size_t row_bytes = activation_row_bytes(op.activation_kind, columns);
  for (int t = 0; t < task.num_tokens; t++, out += columns, activations += row_bytes)
    quantize_rows(op.activation_kind, out, columns, 1, columns, activations);
}

void Program::write_attention(const Op& op, const Task& task, uint8_t* result, Scratch& scratch) {
  if (task.num_slots > 1) {
    const int heads = shape_.num_heads / shape_.num_kv_heads;
    float* partials = partial_.floats() + task.first_slot * partial_floats();
    std::memcpy(partials + (task.slot - task.first_slot) * partial_floats(), result,
                partial_floats() * sizeof(float));
    // The last thread to be done combines the partitions, in their order.
    std::atomic<int>& finished = finished_slots_[task.first_slot];
    if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < task.num_slots) return;
    const AttentionState total = partial_state(partials);
    for (int i = 1; i < task.num_slots; i++)
      attention_.combine(total, partial_state(partials + i * partial_floats()), heads, kv_.padded_head_dim());
    finish_attention(op, task, total, scratch, result);
  }
  copy_attention(op, slice_rows_, task, result);
}

void Program::copy_attention(const Op& op, const Rows& rows, const Task& task, const uint8_t* result) const {
  const int columns = shape_.num_heads / shape_.num_kv_heads * shape_.head_dim;
  const size_t stride = activation_row_bytes(op.activation_kind, shape_.num_heads * shape_.head_dim);
  const size_t row_bytes = activation_row_bytes(op.activation_kind, columns);
  uint8_t* out = rows.activations(1, task.token, stride) +
                 activation_offset(op.activation_kind, task.kv_head * columns);
  for (int t = 0; t < task.num_tokens; t++, out += stride, result += row_bytes)
    std::memcpy(out, result, activation_offset(op.activation_kind, columns));
}

const Program::TaskList& Program::tasks_of(const Op& op) {
  auto list = std::find_if(task_lists_.begin(), task_lists_.end(), [&](const TaskList& l) {
    return l.window == op.attention.window;
  });
  if (list == task_lists_.end()) {
    task_lists_.push_back({op.attention.window, false, {}, {}, 0});
    list = task_lists_.end() - 1;
  }
  if (!list->is_made) make_tasks(*list);
  return *list;
}

// The tasks of rows of the slice, each with all its partitions.
void Program::find_tasks(int window, int first_row, int end_row, std::vector<Task>& tasks) const {
  tasks.clear();
  const int tokens_of_task =
      std::max(1, kTaskRows / (shape_.num_heads / shape_.num_kv_heads));
  const int first_token = first_token_ + first_row, end_token = first_token_ + end_row;
  const int32_t* starts = step_.query_start_loc;
  const int32_t* after = std::upper_bound(starts + first_sequence_, starts + step_.num_sequences + 1, first_token);
  for (int s = int(after - starts) - 1; s < step_.num_sequences; s++) {
    int token = std::max(starts[s], first_token);
    const int end = std::min(starts[s + 1], end_token);
    if (token >= end_token) break;
    while (token < end) {
      const int num_tokens = std::min(end - token, tokens_of_task);
      const int position = step_.positions[token], last = position + num_tokens - 1;
      const int first = first_key(position, window);
      // Fetching a key costs about what another token does with it.
      const int64_t cost = int64_t(num_tokens + 1) * (last + 1 - first);
      for (int g = 0; g < shape_.num_kv_heads; g++)
        tasks.push_back({s, token - first_token_, num_tokens, g, first / kPartition, last / kPartition, 0, 0, 1, cost});
      token += num_tokens;
    }
  }
}

// One token's partitions are shared out if they are more than a fair share of the work; those of
// several tokens are taken by one thread in turn.
void Program::make_tasks(TaskList& list) {
  list.is_made = true;
  list.tasks.clear();
  list.num_slots = 0;
  find_tasks(list.window, 0, num_tokens_, found_tasks_);
  int64_t total = 0;
  for (const Task& task : found_tasks_) total += task.cost;
  const int64_t fair_share = total / (kTilesPerThread * pool_.num_threads());
  for (Task& task : found_tasks_) {
    const int first = task.first_partition, last = task.last_partition;
    if (task.num_tokens > 1 || first == last || task.cost <= fair_share) {
      list.tasks.push_back(task);
      continue;
    }
    task.first_slot = list.num_slots;
    task.num_slots = last - first + 1;
    task.cost /= task.num_slots;
    for (int p = first; p <= last; p++) {
      task.first_partition = task.last_partition = p;
      task.slot = list.num_slots++;
      list.tasks.push_back(task);
    }
  }
  make_tiles(list);
}

// The longest tasks come first, and tiles become smaller towards the end, so that the threads end at about the same
// time. A tile has few tasks, but more than one: each fetches what the next begins with.
void Program::make_tiles(TaskList& list) const {
  std::vector<Task>& tasks = list.tasks;
  std::sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
    if (a.cost != b.cost) return a.cost > b.cost;
    return std::tie(a.token, a.kv_head, a.slot) < std::tie(b.token, b.kv_head, b.slot);
  });
  int64_t left = 0;
  for (const Task& task : tasks) left += task.cost;
  list.first_tasks.assign(1, 0);
  for (int i = 0; i < int(tasks.size());) {
    const int begin = i;
    const int64_t enough = left / (2 * pool_.num_threads());
    int64_t cost = 0;
    do {
      cost += tasks[i++].cost;
    } while (i < int(tasks.size()) && i < begin + kMaxTasksOfTile && cost + tasks[i].cost <= enough);
    left -= cost;
    list.first_tasks.push_back(i);
  }
}

// All that some rows need, for this thread.
void Program::attend_rows(const Op& op, const Rows& rows, int end_row, Scratch& scratch) {
  std::vector<Task>& tasks = scratch.tasks;
  std::vector<AttentionTask>& attention_tasks = scratch.attention_tasks;
  find_tasks(op.attention.window, rows.first, end_row, tasks);
  attention_tasks.clear();
  for (const Task& task : tasks) attention_tasks.push_back(attention_task(op, task));
  for (size_t i = 0; i + 1 < tasks.size(); i++) attention_tasks[i].next = &attention_tasks[i + 1];
  attention_.fetch(kv_, op.attention, attention_tasks[0]);
  for (size_t i = 0; i < tasks.size(); i++) {
    scratch.results.reserve(result_bytes(op, tasks[i]));
    attend(op, tasks[i], attention_tasks[i], scratch, scratch.results.bytes());
    copy_attention(op, rows, tasks[i], scratch.results.bytes());
  }
}

}  // namespace engine
