// The attention of a program: queries, keys and values of a slice, and the tasks that read them.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "phases/attend/attention_tasks.h"
#include "phases/attend/key_choice.h"
#include "model/ranks.h"
#include "model/rope.h"
#include "model/rows.h"
#include "phases/scratch.h"
#include "runtime/buffer.h"
#include "runtime/threads.h"

namespace engine {

class Attention {
 public:
  Attention(const Model& model, const Ranks& ranks, const Slice& slice, int num_threads)
      : model_(model), ranks_(ranks), slice_(slice), tasks_(model, slice, num_threads), choice_(model, slice) {}

  void add_op(const Op& op);
  // Makes room for the queries of a slice.
  void reserve(int rows);
  void release() {
    for (Queries& each : queries_) each.buffer.release();
    choice_.release();
  }
  void begin_slice() {
    tasks_.begin_slice();
    choice_.begin_slice();
  }

  // Shares the squares of a row's queries and keys with the other ranks.
  void share_squares(const Op& op, const float* qkv, int row) const;
  // Norms and rotates a row's queries and keys. Stores the queries for the next attention, keys and values in the
  // cache.
  void rotate_store(const Op& op, const RotaryTables& ropes, float* qkv, int row);

  // Divides an operation into tiles; returns their number.
  int begin(const Op& op);
  void run(const Op& op, Tile& tile, const Rows& rows, Scratch& scratch);

  // The same for the choice of keys.
  int begin_choice(const Op& op) { return choice_.begin(op); }
  void choose(const Op& op, Tile& tile, const Rows& rows, Scratch& scratch);

  // Computes rows [rows.first, end_row) of the slice in this thread alone.
  void attend_rows(const Op& op, const Rows& rows, int end_row, Scratch& scratch) const;

  const AttentionTasks& tasks() const { return tasks_; }
  // Returns a task as the kernels take it.
  AttentionTask kernel_task(const Op& op, const AttentionTasks::Task& task) const;

 private:
  using Task = AttentionTasks::Task;

  void norm_queries_and_keys(const Op& op, float* qk, int row) const;
  // Norms heads by those of all ranks, whose squares are element `index` of their parts.
  void norm_shared(const Op& op, float* heads, int num_heads, int index, int row) const;
  void scale_queries(const Op& op, float* queries, int size, int row) const;
  void rotate_store_latent(const Op& op, const RotaryTables& ropes, float* qkv, int row);
  // Stores a row's converted queries, [num_heads][head_dim], and its keys and values.
  void store_queries(const Op& op, int row, const float* query_heads);
  void store(const Op& op, int row, const float* query_heads, const float* keys, const float* values);
  void norm_heads(const Op& op, float* heads, int num_heads, const float* weight) const;
  // Returns the values of a row, normed and behind its keys; null if there are none.
  const float* place_values(const Op& op, float* qkv) const;
  // The queries of the heads that share a key/value head, in the kernels' format.
  uint32_t* queries(const Op& op, int kv_head, int row) const;
  size_t result_bytes(const Op& op, const Task& task) const;
  void attend(const Op& op, const Task& task, const AttentionTask& kernel_task, const Rows& rows, Scratch& scratch,
              uint8_t* result) const;
  void finish(const Op& op, const Task& task, const AttentionState& total, const Rows& rows, Scratch& scratch,
              uint8_t* activations) const;
  void write(const Op& op, const Task& task, const Rows& rows, uint8_t* result, Scratch& scratch);
  void copy(const Op& op, const Rows& rows, const Task& task, const uint8_t* result) const;
  // The elements of a head that the operation writes.
  int output_dim(const Op& op) const;
  size_t partial_floats(const Op& op) const;
  AttentionState partial_state(const Op& op, float* floats) const;

  const Model& model_;
  const Ranks& ranks_;
  const Slice& slice_;
  AttentionTasks tasks_;
  KeyChoice choice_;
  // The queries of a slice in layers with equal heads, by key/value head. Pieces may be in layers with other heads.
  struct Queries {
    int num_kv_heads, head_dim;
    Buffer buffer;
  };
  std::deque<Queries> queries_;
  // What tasks and rows need of an operation, if it has to do with attention.
  struct RecordedOp {
    KVLayout kv;
    int heads;  // that share a key/value head
    size_t query_words;
    const Queries* queries;
    const AttentionTasks::List* list;
  };
  const RecordedOp& recorded(const Op& op) const { return recorded_ops_[model_.index_of(op)]; }

  std::vector<RecordedOp> recorded_ops_;
  Buffer partial_;                                  // the partial states of an operation, by slot
  // How many partitions of a token are done, in the token's first slot.
  std::unique_ptr<std::atomic<int>[]> finished_slots_;
  size_t num_finished_slots_ = 0;
};

}  // namespace engine
