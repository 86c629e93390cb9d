// The order in which threads compute the pieces of a step.
//
// A piece passes through segments one after the other, each in any thread. Every thread owns some pieces and prefers
// them, because their data is in its caches. It takes pieces of other threads that have fallen behind, so no thread
// waits for another as long as there is a piece that no thread has taken. If all are taken, a thread computes a taken
// piece once more, in case the other thread was descheduled, and the first to finish writes the results.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace engine {

struct PieceSegment {
  int piece, segment;
};

class PieceQueue {
 public:
  // Begins a slice. No thread may be in any of the other functions. If `in_order`, a segment of a piece waits until the
  // previous pieces have completed all earlier segments.
  void begin(int num_pieces, int num_segments, int num_threads, bool in_order);

  // Waits for the next segment that the thread should compute. Returns false when nothing is left for any thread.
  bool take(int thread, PieceSegment& next);
  // Returns whether no thread has committed this segment yet, so that it is worth computing.
  bool is_wanted(const PieceSegment& at) const { return state(at.piece) <= taken(at.segment); }
  // Returns whether the thread may write the segment's results. Must be called before the first write outside of the
  // thread's own memory. If it returns true, `finish` must be called after the writes.
  bool commit(const PieceSegment& at);
  void finish(const PieceSegment& at);

  // Returns the segment that a thread takes after `at` if all threads are equally fast. It may be past the last
  // segment.
  PieceSegment after(const PieceSegment& at) const;

 private:
  // The states of a segment in ascending order: open, taken, or committed and being written.
  static constexpr uint32_t open(int segment) { return uint32_t(segment) * 3; }
  static constexpr uint32_t taken(int segment) { return open(segment) + 1; }
  static constexpr uint32_t committed(int segment) { return open(segment) + 2; }
  struct alignas(64) Piece {
    std::atomic<uint32_t> state{0};
  };

  uint32_t state(int piece) const { return pieces_[piece].state.load(std::memory_order_acquire); }
  bool is_owned(int thread, int piece) const { return piece / pieces_of_thread_ == thread; }
  bool is_possible(int piece, int segment) const;
  // Finds, among the open or the taken pieces that can be computed, the one that is furthest behind. Returns false if
  // there is none.
  bool furthest_behind(int thread, bool is_taken, PieceSegment& found) const;

  int num_pieces_ = 0, num_segments_ = 0, pieces_of_thread_ = 1;
  bool in_order_ = false;
  std::unique_ptr<Piece[]> pieces_;
  int capacity_ = 0;
};

}  // namespace engine
