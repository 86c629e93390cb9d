// Which piece of a step a thread computes next.
//
// A piece goes through segments, one after the other, in any thread. Each thread has pieces of its own, which it
// prefers because their data is in its caches, and takes those of other threads where these have fallen behind: no
// thread waits for another as long as there is a piece that no thread has taken. Where all are taken, a thread computes
// one once more, in case the other one has lost its processor, and the first to be done writes it.
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
  // Not to be called while a thread is in any of the other functions. `in_order`: a segment of a piece needs all
  // segments before it of the pieces before.
  void begin(int num_pieces, int num_segments, int num_threads, bool in_order);

  // Waits for what the thread is to compute next; false when there is nothing left for any thread.
  bool take(int thread, PieceSegment& next);
  // Whether it still makes sense to compute it.
  bool is_wanted(const PieceSegment& at) const { return state(at.piece) <= taken(at.segment); }
  // To be asked before the first write outside of the thread's own memory: whether it may write. Then `finish` must
  // follow.
  bool commit(const PieceSegment& at);
  void finish(const PieceSegment& at);

  // What a thread that has taken `at` takes next, if all threads are equally fast; perhaps past the last segment.
  PieceSegment after(const PieceSegment& at) const;

 private:
  // Of a piece, ascending: its segment is open, taken, or committed by a thread that writes it.
  static constexpr uint32_t open(int segment) { return uint32_t(segment) * 3; }
  static constexpr uint32_t taken(int segment) { return open(segment) + 1; }
  static constexpr uint32_t committed(int segment) { return open(segment) + 2; }
  struct alignas(64) Piece {
    std::atomic<uint32_t> state{0};
  };

  uint32_t state(int piece) const { return pieces_[piece].state.load(std::memory_order_acquire); }
  bool is_owned(int thread, int piece) const { return piece / pieces_of_thread_ == thread; }
  bool is_possible(int piece, int segment) const;
  // The piece that is furthest behind of those open, or of those taken, and that it is possible to compute; false if
  // there is none.
  bool furthest_behind(int thread, bool is_taken, PieceSegment& found) const;

  int num_pieces_ = 0, num_segments_ = 0, pieces_of_thread_ = 1;
  bool in_order_ = false;
  std::unique_ptr<Piece[]> pieces_;
  int capacity_ = 0;
};

}  // namespace engine
