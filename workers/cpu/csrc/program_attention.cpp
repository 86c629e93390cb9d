// How a program shares out its attention.
#include <algorithm>

#include "program.h"

namespace engine {

namespace {

constexpr int kMaxTasksOfTile = 8;

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
  return (int(tasks_->tasks.size()) + tasks_->tasks_of_tile - 1) / tasks_->tasks_of_tile;
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
  return {
      qkv(task.token) + task.kv_head * heads * shape_.head_dim,
      qkv_size_,
      step_.positions[first_token_ + task.token],
      task.num_tokens,
      heads,
      task.kv_head,
      task.first_partition,
      task.last_partition,
      group.block_table + task.sequence * group.block_table_stride,
      step_.kv_caches[op.layer],
      nullptr,
  };
}

void Program::run_attention(const Op& op, int tile, int thread) {
  const int begin = tile * tasks_->tasks_of_tile;
  const int end = std::min(begin + tasks_->tasks_of_tile, int(tasks_->tasks.size()));
  AttentionTask next = attention_task(op, tasks_->tasks[begin]);
  for (int i = begin; i < end; i++) {
    AttentionTask attention = next;
    if (i + 1 < end) {
      next = attention_task(op, tasks_->tasks[i + 1]);
      attention.next = &next;
    }
    attend(op, tasks_->tasks[i], attention, *scratch_[thread]);
  }
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
    task_lists_.push_back({op.attention.window, false, {}, 1, 0});
    list = task_lists_.end() - 1;
  }
  if (!list->is_made) make_tasks(*list);
  return *list;
}

// One token's partitions are shared out; those of several tokens are taken by one thread in turn.
void Program::make_tasks(TaskList& list) {
  list.is_made = true;
  list.tasks.clear();
  list.num_slots = 0;
  const int tokens_of_task =
      std::max(1, kTaskRows / (shape_.num_heads / shape_.num_kv_heads));
  const int end_of_slice = first_token_ + num_tokens_;
  bool has_prompts = false;
  for (int s = first_sequence_; s < step_.num_sequences; s++) {
    int token = std::max(step_.query_start_loc[s], first_token_);
    const int end = std::min(step_.query_start_loc[s + 1], end_of_slice);
    if (token >= end_of_slice) break;
    while (token < end) {
      const int num_tokens = std::min(end - token, tokens_of_task);
      const int position = step_.positions[token];
      const int first = first_key(position, list.window) / kPartition;
      const int last = (position + num_tokens - 1) / kPartition;
      const int num_slots = num_tokens == 1 ? last - first + 1 : 1;
      has_prompts |= num_tokens > 1;
      for (int g = 0; g < shape_.num_kv_heads; g++) {
        Task task{s, token - first_token_, num_tokens, g, first, last, list.num_slots, 0, num_slots};
        if (num_slots == 1) {
          list.tasks.push_back(task);
          continue;
        }
        for (int p = first; p <= last; p++) {
          task.first_partition = task.last_partition = p;
          task.slot = list.num_slots++;
          list.tasks.push_back(task);
        }
      }
      token += num_tokens;
    }
  }
  const int shares = kTilesPerThread * pool_.num_threads();
  list.tasks_of_tile = std::clamp(int(list.tasks.size()) / shares, 1, kMaxTasksOfTile);
  if (!has_prompts) return;
  list.tasks_of_tile = 1;
  // What takes longest goes first.
  const auto cost = [&](const Task& task) {
    return task.num_tokens * (step_.positions[first_token_ + task.token] + task.num_tokens);
  };
  std::sort(list.tasks.begin(), list.tasks.end(),
            [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
}

}  // namespace engine
