// The attention of a program: the queries, keys and values of a slice, and the tasks that read them.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "phases/attend/attention_tasks.h"
#include "phases/attend/entries.h"
#include "phases/attend/heads.h"
#include "phases/attend/index_keys.h"
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
  Attention(const Model& model, const Ranks& ranks, const RotaryTables& ropes, const Slice& slice, int num_threads)
      : model_(model),
        ropes_(ropes),
        slice_(slice),
        heads_(model, ranks, ropes, slice),
        tasks_(model, slice, num_threads),
        entries_(model, ropes, slice),
        index_keys_(model, ropes, slice),
        choice_(model, entries_, slice) {}

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

  const Heads& heads() const { return heads_; }
  const IndexKeys& index_keys() const { return index_keys_; }
  // Reads the key that an earlier layer has stored for a row.
  void load_key(const Op& op, float* qkv, int row) const;
  // Computes and stores the entry whose last token is the row's, if there is one (compressed attention).
  void store_entries(const Op& op, int row) const { entries_.store(op, row, slice_.sequence_of(row)); }
  // Norms and rotates a row's queries and keys. Stores the queries for the next attention, and keys and values in the
  // cache.
  void rotate_store(const Op& op, float* qkv, int row);

  // Divides an operation into tiles, and returns their number.
  int begin(const Op& op);
  void run(const Op& op, Tile& tile, const Rows& rows, Scratch& scratch);

  // `begin` and `run` for an operation by which an indexer chooses keys (sparse attention).
  int begin_choice(const Op& op) { return choice_.begin(op); }
  void choose(const Op& op, Tile& tile, const Rows& rows, Scratch& scratch);

  // Computes rows [rows.first, end_row) of the slice in this thread alone.
  void attend_rows(const Op& op, const Rows& rows, int end_row, Scratch& scratch) const;

  const AttentionTasks& tasks() const { return tasks_; }
  // Returns a task in the form that the kernels expect, without biases that depend on the queries.
  AttentionTask kernel_task(const Op& op, const AttentionTasks::Task& task) const;

 private:
  using Task = AttentionTasks::Task;

  // Stores the key of a row for a key/value head.
  void store_head(const Op& op, int row, int kv_head, const float* key, const float* value) const;
  void rotate_store_latent(const Op& op, float* qkv, int row);
  void rotate_store_compressed(const Op& op, float* qkv, int row);
  // Converts and stores a row's queries, [num_heads][head_dim], and stores its keys and values.
  void store_queries(const Op& op, int row, const float* query_heads);
  void store(const Op& op, int row, const float* query_heads, const float* keys, const float* values);
  // Returns the queries of the heads that share a key/value head, in the kernels' format.
  uint32_t* queries(const Op& op, int kv_head, int row) const;
  // Returns `kernel_task` with the biases that depend on the queries.
  AttentionTask task_of_rows(const Op& op, const Task& task, const Rows& rows) const;
  size_t result_bytes(const Op& op, const Task& task) const;
  void attend(const Op& op, const Task& task, const AttentionTask& kernel_task, const Rows& rows, Scratch& scratch,
              uint8_t* result) const;
  // Continues the softmax of a task's tokens with their entries.
  void add_entries(const Op& op, const Task& task, const AttentionState& total, Scratch& scratch) const;
  // Continues it for tokens [first, end) of the task with the copied entries, given the range of each token.
  void attend_copied(const Op& op, const Task& task, int first, int end, const AttentionState& total,
                     Scratch& scratch) const;
  void finish(const Op& op, const Task& task, const AttentionState& total, const Rows& rows, Scratch& scratch,
              uint8_t* activations) const;
  void write(const Op& op, const Task& task, const Rows& rows, uint8_t* result, Scratch& scratch);
  void copy(const Op& op, const Rows& rows, const Task& task, const uint8_t* result) const;
  // The number of elements of a head that the operation writes.
  int output_dim(const Op& op) const;
  size_t partial_floats(const Op& op) const;
  AttentionState partial_state(const Op& op, float* floats) const;

  const Model& model_;
  const RotaryTables& ropes_;
  const Slice& slice_;
  Heads heads_;
  AttentionTasks tasks_;
  Entries entries_;
  IndexKeys index_keys_;
  KeyChoice choice_;
  // The queries of a slice, by key/value head, for layers with equal heads. At the same time, other pieces may be in
  // layers with other heads.
  struct Queries {
    int num_heads, num_kv_heads, head_dim;
    Buffer buffer;
  };
  std::deque<Queries> queries_;
  // The data of an operation that tasks and rows need, if it is part of attention.
  struct RecordedOp {
    KVLayout kv;
    int heads;  // the number of heads that share a key/value head
    size_t query_words;
    const Queries* queries;
    const AttentionTasks::List* list;
  };
  const RecordedOp& recorded(const Op& op) const { return recorded_ops_[model_.index_of(op)]; }

  std::vector<RecordedOp> recorded_ops_;
  Buffer partial_;  // the partial states of an operation, by slot
  // The number of a token's partitions that are complete, stored in the token's first slot.
  std::unique_ptr<std::atomic<int>[]> finished_slots_;
  size_t num_finished_slots_ = 0;
};

}  // namespace engine
