// How the attention of a slice is divided among threads.
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

  // The tasks of a slice for the layers with one window. Tile i has tasks [first_tasks[i], first_tasks[i + 1]).
  struct List {
    int window;
    bool is_made;
    std::vector<Task> tasks;
    std::vector<int> first_tasks;
    int num_slots;
  };

  static constexpr int kMaxTasksOfTile = 16;

  AttentionTasks(const Model& model, const Slice& slice, int num_threads)
      : model_(model), slice_(slice), num_threads_(num_threads) {}

  // All lists are made anew. No thread may read them any more.
  void begin_slice() {
    for (List& list : lists_) list.is_made = false;
  }
  // Returns the list of a window. It is valid until the next slice begins.
  const List& of_window(int window);
  // Finds the tasks of some rows of the slice, each with all its partitions.
  void find(int window, int first_row, int end_row, std::vector<Task>& tasks) const;

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
