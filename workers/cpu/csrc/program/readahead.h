// Determines which memory a thread prefetches while it computes the products of a piece: what the next attention reads,
// and where results are stored at the end of the segment.
//
// A step of many sequences spends its time in products, which need little memory bandwidth, and in attention, which
// waits for memory: every layer's keys and values are read once per step, and the places where new ones are stored are
// not in the caches either. So this memory is prefetched during the preceding products.
#pragma once

#include <deque>
#include <vector>

#include "phases/attend/attention.h"
#include "model/model.h"
#include "program/pieces.h"
#include "model/step.h"
#include "runtime/readahead.h"

namespace engine {

class ReadaheadPlan {
 public:
  ReadaheadPlan(const Model& model, const Slice& slice, const Attention& attention, const Pieces& pieces,
                int num_threads)
      : model_(model), slice_(slice), attention_(attention), pieces_(pieces), num_threads_(num_threads) {}

  // Finds the memory that the pieces of a slice read and store.
  void begin_slice();
  // Returns what a thread prefetches during a segment of a piece: what its next attention reads, then what the piece
  // stores at the end of the segment, at a rate that completes all of it by then.
  Readahead of(const PieceSegment& at) const;

 private:
  struct FoundRuns {
    std::vector<Run> runs;
    ptrdiff_t bytes;
  };
  // The memory that is prefetched before a piece's keys and values are stored in a layer's cache, and before its
  // attention. It is the same for all layers with the same blocks and window.
  struct PieceRuns {
    FoundRuns stored, attended;
  };
  struct RunList {
    int group, window;
    bool is_made;
    std::vector<PieceRuns> pieces;
  };

  template <class Lists>
  static auto list_of(Lists& lists, const Op& op);
  void find_stored(FoundRuns& runs, const Op& op, int first_row, int end_row) const;
  void find_attended(FoundRuns& runs, const Op& op, int first_row, int end_row);

  const Model& model_;
  const Slice& slice_;
  const Attention& attention_;
  const Pieces& pieces_;
  const int num_threads_;
  std::deque<RunList> lists_;
  std::vector<AttentionTasks::Task> found_tasks_;
};

}  // namespace engine
