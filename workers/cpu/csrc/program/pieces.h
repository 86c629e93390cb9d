// Long steps in pieces: a piece is a set of rows of a slice that one thread takes from one layer's attention to the
// next one's.
//
// The intermediate results between two operations stay in the thread's own caches, and the data that the next attention
// reads is prefetched there. Threads do not wait for each other between operations, nor between layers if rows do not
// need each other's keys.
#pragma once

#include <cstdint>
#include <vector>

#include "model/model.h"
#include "model/step.h"
#include "runtime/piece_queue.h"

namespace engine {

// The operations from one attention to the next, and their weights.
struct Segment {
  int first_op, end_op;
  int64_t weights = 0;
  ptrdiff_t bytes = 0;
  int rows_at_once = 64;  // the minimum over the formats of all weights
};

class Pieces {
 public:
  Pieces(const Model& model, const Slice& slice, int num_threads)
      : model_(model), slice_(slice), num_threads_(num_threads) {}

  void add_op() { segments_.clear(); }
  // `first_unneeded` is the first operation that only rows with requested results need.
  void begin_step(int first_unneeded) {
    if (segments_.empty()) find_segments();
    first_unneeded_ = first_unneeded;
  }
  // Pieces begin with this operation. The operations before it compute what the first layer reads.
  int first_op() const { return segments_[0].first_op; }
  const std::vector<Segment>& segments() const { return segments_; }

  // Divides a slice into pieces, or into none if its operations should be divided one by one instead. That is
  // required if ranks meet in operations, and if an expert's weights are read for the rows of all pieces.
  void begin_slice(bool must_share);
  int count() const { return count_; }
  int first_row(int piece) const { return int(int64_t(slice_.num_tokens) * piece / count_); }

  // Returns whether a segment of a piece must be computed. A segment that stores nothing can be skipped if no results
  // of the rows are requested.
  bool is_needed(const PieceSegment& at) const;
  PieceQueue& queue() { return queue_; }
  const PieceQueue& queue() const { return queue_; }

 private:
  void find_segments();
  int best_count() const;
  bool reads_own_keys();

  const Model& model_;
  const Slice& slice_;
  const int num_threads_;
  std::vector<Segment> segments_;
  int num_groups_ = 0;  // the number of groups in the KV cache
  int first_unneeded_ = 0;
  bool gates_attention_ = false;
  int count_ = 0;
  std::vector<int32_t> filled_blocks_;  // the blocks that the slice fills in one group
  PieceQueue queue_;
};

}  // namespace engine
