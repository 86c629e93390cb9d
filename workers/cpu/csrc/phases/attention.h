// The attention of a program: queries, keys and values of a slice, and the tasks that read them.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "phases/attention_tasks.h"
#include "model/rope.h"
#include "model/rows.h"
#include "phases/scratch.h"
#include "runtime/buffer.h"
#include "runtime/threads.h"

namespace engine {

class Attention {
 public:
  Attention(const Model& model, const Slice& slice, int num_threads)
      : model_(model), slice_(slice), tasks_(model, slice, num_threads) {}

  void add_op() { lists_.push_back(nullptr); }
  // Makes room for the queries of a slice.
  void reserve(int rows);
  void begin_slice() { tasks_.begin_slice(); }

  // Norms and rotates a row's queries and keys. Stores the queries for the next attention, keys and values in the
  // cache.
  void rotate_store(const Op& op, const RotaryTables& ropes, float* qkv, int row);

  // Divides an operation into tiles; returns their number.
  int begin(const Op& op);
  void run(const Op& op, Tile& tile, const Rows& rows, Scratch& scratch);

  // Computes rows [rows.first, end_row) of the slice in this thread alone.
  void attend_rows(const Op& op, const Rows& rows, int end_row, Scratch& scratch) const;

  const AttentionTasks& tasks() const { return tasks_; }
  // Returns a task as the kernels take it.
  AttentionTask kernel_task(const Op& op, const AttentionTasks::Task& task) const;

 private:
  using Task = AttentionTasks::Task;

  void norm_queries_and_keys(const Op& op, float* qk) const;
  void rotate_store_latent(const Op& op, const RotaryTables& ropes, float* qkv, int row);
  // Stores a row's converted queries, [num_heads][head_dim], and its keys and values.
  void store_queries(const Op& op, int row, const float* query_heads);
  void store(const Op& op, int row, const float* query_heads, const float* keys, const float* values);
  void norm_heads(const Op& op, float* heads, int num_heads, const float* weight) const;
  // The queries of the heads that share a key/value head, in the kernels' format.
  uint32_t* queries(int kv_head, int row) const;
  size_t result_bytes(const Op& op, const Task& task) const;
  void attend(const Op& op, const Task& task, const AttentionTask& kernel_task, const Rows& rows, Scratch& scratch,
              uint8_t* result) const;
  void finish(const Op& op, const Task& task, const AttentionState& total, const Rows& rows, Scratch& scratch,
              uint8_t* activations) const;
  void write(const Op& op, const Task& task, const Rows& rows, uint8_t* result, Scratch& scratch);
  void copy(const Op& op, const Rows& rows, const Task& task, const uint8_t* result) const;
  size_t partial_floats() const;
  AttentionState partial_state(float* floats) const;

  const Model& model_;
  const Slice& slice_;
  AttentionTasks tasks_;
  std::vector<const AttentionTasks::List*> lists_;  // of each operation
  Buffer queries_;                                  // of the slice, by key/value head
  Buffer partial_;                                  // the partial states of an operation, by slot
  // How many partitions of a token are done, in the token's first slot.
  std::unique_ptr<std::atomic<int>[]> finished_slots_;
  size_t num_finished_slots_ = 0;
};

}  // namespace engine
