#include "phases/attend/attention_tasks.h"

#include <algorithm>
#include <tuple>

namespace engine {

const AttentionTasks::List& AttentionTasks::of_keys(const Keys& keys) {
  auto list = std::find_if(lists_.begin(), lists_.end(), [&](const List& l) { return l.keys == keys; });
  if (list == lists_.end()) {
    lists_.push_back({keys, false, {}, {}, 0});
    list = lists_.end() - 1;
  }
  if (!list->is_made) make(*list);
  return *list;
}

void AttentionTasks::find(const Keys& keys, int first_row, int end_row, std::vector<Task>& tasks) const {
  tasks.clear();
  const Step& step = slice_.step;
  const int tokens_of_task = std::max(1, kTaskRows * keys.num_kv_heads / model_.shape.num_heads);
  const int first_token = slice_.first_token + first_row, end_token = slice_.first_token + end_row;
  const int32_t* starts = step.query_start_loc;
  const int32_t* after = std::upper_bound(starts + slice_.first_sequence, starts + step.num_sequences + 1, first_token);
  for (int s = int(after - starts) - 1; s < step.num_sequences; s++) {
    int token = std::max(starts[s], first_token);
    const int end = std::min(starts[s + 1], end_token);
    if (token >= end_token) break;
    while (token < end) {
      const int32_t* visible = keys.of_source ? nullptr : slice_.visible(token, keys.window);
      int num_tokens = std::min(end - token, tokens_of_task);
      // The last token of a task sees the last of its keys.
      for (int i = 1; visible && i < num_tokens; i++)
        if (visible[2 * i + 1] < visible[2 * i - 1]) num_tokens = i;
      const int position = step.positions[token];
      int last = end_key(position + num_tokens - 1, keys.window, num_keys(keys, s)) - 1;
      int first = first_key(position, keys.window);
      if (visible) {
        first = std::min(first, visible[0]);
        last = visible[2 * num_tokens - 1] - 1;
      }
      // The cost of fetching a key, about the same as of computing with it for one more token.
      const int64_t cost = int64_t(num_tokens + 1) * (last + 1 - first);
      for (int g = 0; g < keys.num_kv_heads; g++)
        tasks.push_back(
            {s, token - slice_.first_token, num_tokens, g, first / kPartition, last / kPartition, 0, 0, 1, cost});
      token += num_tokens;
    }
  }
}

// The partitions of one token become separate tasks if together they are more than a thread's fair share of the work.
// With several tokens, one thread computes all partitions, one after the other.
void AttentionTasks::make(List& list) {
  list.is_made = true;
  list.tasks.clear();
  list.num_slots = 0;
  find(list.keys, 0, slice_.num_tokens, found_);
  int64_t total = 0;
  for (const Task& task : found_) total += task.cost;
  const int64_t fair_share = total / (kTilesPerThread * num_threads_);
  for (Task& task : found_) {
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

// The longest tasks come first, and tiles become smaller towards the end, so that all threads finish at about the same
// time. A tile has few tasks, but more than one where possible: while a thread computes a task, it prefetches the first
// keys of the next one in the tile.
void AttentionTasks::make_tiles(List& list) const {
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
    const int64_t enough = left / (2 * num_threads_);
    int64_t cost = 0;
    do {
      cost += tasks[i++].cost;
    } while (i < int(tasks.size()) && i < begin + kMaxTasksOfTile && cost + tasks[i].cost <= enough);
    left -= cost;
    list.first_tasks.push_back(i);
  }
}

}  // namespace engine
