// How a program shares out its attention.
#include <algorithm>
#include <tuple>

#include "program.h"

namespace engine {

namespace {

constexpr int kMaxTasksOfTile = 16;

}  // namespace

int Program::begin_attention(const Op& op) {
  tasks_ = &tasks_of(op);
  if (tasks_->num_slots) {
    partial_.reserve(tasks_->num_slots * partial_floats() * sizeof(float));
    if (size_t(tasks_->num_slots) > num_finished_slots_) {
      num_finished_slots_ = tasks_->num_slots;
      finished_slots_.reset(new std::atomic<int>[num_finished_slots_]);
    }
    for (int i = 0; i < tasks_->num_slots; i++) finished_slots_[i].store(0);
  }
  return int(tasks_->first_tasks.size()) - 1;
}

size_t Program::partial_floats() const {
  return size_t(shape_.num_heads / shape_.num_kv_heads) * (kv_.padded_head_dim() + 32);
}

AttentionState Program::partial_state(int slot) const {
  const int rows = shape_.num_heads / shape_.num_kv_heads;
  float* state = partial_.floats() + slot * partial_floats();
  return {state, state + 16 * rows, state + 32 * rows};
}

AttentionTask Program::attention_task(const Op& op, const Task& task) const {
  const int heads = shape_.num_heads / shape_.num_kv_heads;
  const StepGroup& group = step_.groups[op.group];
  const int64_t table_row = step_.table_rows ? step_.table_rows[task.sequence] : task.sequence;
  return {
      qkv(task.token) + task.kv_head * heads * shape_.head_dim,
      qkv_size_,
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

void Program::run_attention(const Op& op, int tile, int thread) {
  const int begin = tasks_->first_tasks[tile], count = tasks_->first_tasks[tile + 1] - begin;
  AttentionTask tasks[kMaxTasksOfTile] = {};
  for (int i = 0; i < count; i++) {
    tasks[i] = attention_task(op, tasks_->tasks[begin + i]);
    if (i) tasks[i - 1].next = &tasks[i];
  }
  attention_.fetch(kv_, op.attention, tasks[0]);
  for (int i = 0; i < count; i++)
    attend(op, tasks_->tasks[begin + i], tasks[i], *scratch_[thread]);
}

void Program::attend(const Op& op, const Task& task, const AttentionTask& attention,
                     Scratch& scratch) {
  const int heads = attention.num_heads, rows = task.num_tokens * heads;
  AttentionState total = scratch.attention.total;
  if (task.num_slots > 1) total = partial_state(task.slot);
  attention_.attend(kv_, op.attention, attention, scratch.attention, total);
  if (task.num_slots > 1) {
    // Whoever is last combines the partitions, in their order.
    std::atomic<int>& finished = finished_slots_[task.first_slot];
    if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < task.num_slots) return;
    total = partial_state(task.first_slot);
    for (int i = 1; i < task.num_slots; i++)
      attention_.combine(total, partial_state(task.first_slot + i), rows, kv_.padded_head_dim());
  }
  float* out = scratch.tile.get();
  attention_.finish(total, rows, shape_.head_dim, out);
  const int columns = heads * shape_.head_dim;
  const size_t row_bytes =
      activation_row_bytes(op.activation_kind, shape_.num_heads * shape_.head_dim);
  uint8_t* activations = activations_[1].bytes() + task.token * row_bytes +
                         activation_offset(op.activation_kind, task.kv_head * columns);
  for (int t = 0; t < task.num_tokens; t++, out += columns, activations += row_bytes)
    quantize_rows(op.activation_kind, out, columns, 1, columns, activations);
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

// The tasks of the slice, each with all its partitions.
template <class Function>
void Program::for_each_task(int window, Function f) const {
  const int tokens_of_task =
      std::max(1, kTaskRows / (shape_.num_heads / shape_.num_kv_heads));
  const int end_of_slice = first_token_ + num_tokens_;
  for (int s = first_sequence_; s < step_.num_sequences; s++) {
    int token = std::max(step_.query_start_loc[s], first_token_);
    const int end = std::min(step_.query_start_loc[s + 1], end_of_slice);
    if (token >= end_of_slice) break;
    while (token < end) {
      const int num_tokens = std::min(end - token, tokens_of_task);
      const int position = step_.positions[token], last = position + num_tokens - 1;
      const int first = first_key(position, window);
      // Fetching a key costs about what another token does with it.
      const int64_t cost = int64_t(num_tokens + 1) * (last + 1 - first);
      for (int g = 0; g < shape_.num_kv_heads; g++)
        f(Task{s, token - first_token_, num_tokens, g, first / kPartition, last / kPartition, 0, 0,
               1, cost});
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
  int64_t total = 0;
  for_each_task(list.window, [&](const Task& task) { total += task.cost; });
  const int64_t fair_share = total / (kTilesPerThread * pool_.num_threads());
  for_each_task(list.window, [&](Task task) {
    const int first = task.first_partition, last = task.last_partition;
    if (task.num_tokens > 1 || first == last || task.cost <= fair_share)
      return list.tasks.push_back(task);
    task.first_slot = list.num_slots;
    task.num_slots = last - first + 1;
    task.cost /= task.num_slots;
    for (int p = first; p <= last; p++) {
      task.first_partition = task.last_partition = p;
      task.slot = list.num_slots++;
      list.tasks.push_back(task);
    }
  });
  make_tiles(list);
}

// What takes longest goes first, and tiles become smaller towards the end, where threads would wait for each
// other. A tile's tasks are few, but more than one: each fetches what the next begins with.
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

}  // namespace engine
