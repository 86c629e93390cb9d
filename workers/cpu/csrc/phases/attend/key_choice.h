// The keys to which the tokens of a slice attend, if an indexer chooses them.
//
// The choice of a token is a bit for each key of its sequence. Layers without an indexer use the choice of an earlier
// layer.
#pragma once

#include <cstdint>

#include "model/model.h"
#include "model/rows.h"
#include "model/step.h"
#include "phases/scratch.h"
#include "runtime/buffer.h"
#include "runtime/threads.h"

namespace engine {

class KeyChoice {
 public:
  KeyChoice(const Model& model, const Slice& slice) : model_(model), slice_(slice) {}

  // Makes room for the choices of a slice. No thread may be reading the previous ones.
  void begin_slice();
  void release() { words_.release(); }

  // Divides an operation into tiles of one row each. Returns their number; 0 if every token attends to all keys.
  int begin(const Op& op);
  // `kv_task` describes the sequence of the tile's row.
  void run(const Op& op, Tile& tile, const AttentionTask& kv_task, const Rows& rows, Scratch& scratch);

  // Returns the choices of rows of the slice from `row` on, `stride` words each. Returns null if there are no indexers,
  // or tokens attend to all keys.
  const uint64_t* of(int row) const { return is_limited_ ? words(row) : nullptr; }
  int stride() const { return stride_; }

 private:
  uint64_t* words(int row) const { return reinterpret_cast<uint64_t*>(words_.bytes()) + size_t(row) * stride_; }

  const Model& model_;
  const Slice& slice_;
  Buffer words_;
  int num_keys_ = 0, stride_ = 0;
  bool is_limited_ = false;
};

}  // namespace engine
