// Divides the attention of a slice among threads.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "model/model.h"
#include "model/step.h"
#include "runtime/threads.h"

namespace engine {

class AttentionTasks {
 public:
  // The queries of consecutive tokens of one sequence, for one key/value head and some partitions of their keys.
  struct Task {
    int sequence, token, num_tokens;  // `token` is a row of the slice
    int kv_head, first_partition, last_partition;
    // If one token's partitions are separate tasks, each leaves a partial state in its slot, to be combined. Otherwise
    // num_slots is 1.
    int first_slot, slot, num_slots;
    int64_t cost;
  };

  // The keys to which the tokens of some layers attend: those in a window of their sequence, or those of its source.
  struct Keys {
    explicit Keys(const Op& op)
        : window(op.attention.window), num_kv_heads(op.num_kv_heads), of_source(op.reads_source) {}

    bool operator==(const Keys& other) const {
      return window == other.window && num_kv_heads == other.num_kv_heads && of_source == other.of_source;
    }

    int window, num_kv_heads;
    bool of_source;
  };

  // The tasks of a slice, for all layers with the same keys. Tile i has tasks [first_tasks[i], first_tasks[i + 1]).
  struct List {
    Keys keys;
    bool is_made;
    std::vector<Task> tasks;
    std::vector<int> first_tasks;
    int num_slots;
  };

  static constexpr int kMaxTasksOfTile = 16;

  AttentionTasks(const Model& model, const Slice& slice, int num_threads)
      : model_(model), slice_(slice), num_threads_(num_threads) {}

  // Clears all lists. No thread may be reading them.
  void begin_slice() {
    for (List& list : lists_) list.is_made = false;
  }
  // Returns the list for these keys. It is valid until the next slice begins.
  const List& of_keys(const Keys& keys);
  // Returns the tasks of some rows of the slice, each with all its partitions.
  void find(const Keys& keys, int first_row, int end_row, std::vector<Task>& tasks) const;
  // Returns the number of keys to which every token of a sequence attends, or 0 if each attends to those up to its own.
  int num_keys(const Keys& keys, int sequence) const {
    if (keys.of_source) return slice_.source_len(sequence);
    return model_.shape.is_bidirectional ? slice_.end_position(sequence) : 0;
  }

 private:
  void make(List& list);
  void make_tiles(List& list) const;

  const Model& model_;
  const Slice& slice_;
  const int num_threads_;
  std::deque<List> lists_;  // a deque, because threads keep references to its elements while others are added
  std::vector<Task> found_;
};

}  // namespace engine
