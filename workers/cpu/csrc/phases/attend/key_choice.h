// The keys to which the tokens of a slice attend, if an indexer chooses them.
//
// The choice of a token for a key/value head is a bit for each key of its sequence. In latent attention, layers without
// an indexer use the choice of an earlier layer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "model/model.h"
#include "model/rows.h"
#include "model/step.h"
#include "phases/attend/entries.h"
#include "phases/scratch.h"
#include "runtime/buffer.h"
#include "runtime/threads.h"

namespace engine {

class KeyChoice {
 public:
  KeyChoice(const Model& model, const Entries& entries, const Slice& slice)
      : model_(model), entries_(entries), slice_(slice) {}

  // Makes room for the choices of a slice. No thread may be reading the previous ones.
  void begin_slice();
  void release() {
    words_.release();
    scores_.release();
  }

  // Divides an operation into tiles: rows or, if these are few, some partitions of a row's keys. Returns their number;
  // 0 if every token attends to all keys.
  int begin(const Op& op);
  int row_of(const Tile& tile) const { return tile.index / num_parts_; }
  // `kv_task` describes the `sequence` of the tile's row.
  void run(const Op& op, Tile& tile, AttentionTask kv_task, int sequence, const Rows& rows, Scratch& scratch);

  // Returns the last choices for a head by rows of the slice from `row` on, `stride` words each. Returns null if tokens
  // attend to all keys.
  const uint64_t* of(int kv_head, int row) const { return is_limited_ ? words(kv_head, row) : nullptr; }
  int stride() const { return stride_; }

 private:
  uint64_t* words(int kv_head, int row) const {
    return reinterpret_cast<uint64_t*>(words_.bytes()) + (size_t(kv_head) * slice_.num_tokens + row) * stride_;
  }
  // Returns the maximum number of candidates (keys or blocks) of a row, with room for what kernels write behind them.
  int most_candidates(const Op& op) const {
    const ChoiceRule& choice = op.choice;
    return (stride_ * kChunk + choice.block_size - 1) / choice.block_size + (choice.has_groups ? kChunk : 0);
  }
  // Returns the number of different choices of a token: one for each key/value head, or one for all.
  int num_choices(const Op& op) const { return op.choice.num_queries ? 1 : op.num_kv_heads; }
  // Writes the scores of the candidates in the task's partitions, `stride` apart for each choice.
  void score(const Op& op, const AttentionTask& kv_task, const float* projection, uint32_t* queries, int stride,
             float* scores) const;
  // Writes those of entries in the task's partitions.
  void score_entries(const Op& op, const AttentionTask& kv_task, int sequence, const float* projection,
                     uint32_t* queries, CopiedKeys& copied, float* scores) const;

  const Model& model_;
  const Entries& entries_;
  const Slice& slice_;
  Buffer words_;
  Buffer scores_;  // of all parts of a row, if it is divided
  // The number of parts that are complete, for each row.
  std::unique_ptr<std::atomic<int>[]> finished_;
  int num_finished_ = 0;
  int num_keys_ = 0, stride_ = 0, num_parts_ = 1;
  bool is_limited_ = false;
};

}  // namespace engine
