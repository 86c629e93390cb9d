#include "runtime/piece_queue.h"

#include <sched.h>

#include "runtime/threads.h"

namespace engine {

namespace {

// The number of spins before a thread sleeps: a few times as many as are needed at the end of a slice if every thread
// has a CPU core.
constexpr int kSpinsBeforeRepeat = 4000;

}  // namespace

void PieceQueue::begin(int num_pieces, int num_segments, int num_threads, bool in_order) {
  if (num_pieces > capacity_) {
    capacity_ = num_pieces;
    pieces_.reset(new Piece[num_pieces]);
  }
  num_pieces_ = num_pieces;
  num_segments_ = num_segments;
  pieces_of_thread_ = (num_pieces + num_threads - 1) / num_threads;
  in_order_ = in_order;
  for (int piece = 0; piece < num_pieces; piece++) pieces_[piece].state.store(open(0), std::memory_order_relaxed);
}

bool PieceQueue::is_possible(int piece, int segment) const {
  for (int before = 0; in_order_ && before < piece; before++)
    if (state(before) < open(segment)) return false;
  return true;
}

bool PieceQueue::furthest_behind(int thread, bool is_taken, PieceSegment& found) const {
  found = {-1, num_segments_};
  for (int piece = 0; piece < num_pieces_; piece++) {
    const uint32_t now = state(piece);
    const int segment = int(now / 3);
    const bool is_better = segment < found.segment || (segment == found.segment && found.piece >= 0 &&
                                                       !is_owned(thread, found.piece) && is_owned(thread, piece));
    if (segment < num_segments_ && is_better && now == (is_taken ? taken(segment) : open(segment)) &&
        is_possible(piece, segment))
      found = {piece, segment};
  }
  return found.piece >= 0;
}

bool PieceQueue::take(int thread, PieceSegment& next) {
  for (int spins = 1;; spins++) {
    if (furthest_behind(thread, false, next)) {
      // This fails if another thread has taken the segment, or has even finished it, in the meantime.
      uint32_t now = open(next.segment);
      if (pieces_[next.piece].state.compare_exchange_strong(now, taken(next.segment), std::memory_order_acq_rel))
        return true;
      continue;
    }
    bool is_done = true;
    for (int piece = 0; piece < num_pieces_; piece++) is_done &= state(piece) >= open(num_segments_);
    if (is_done) return false;
    if (spins % kSpinsBeforeRepeat == 0) {
      if (furthest_behind(thread, true, next)) return true;
      // All remaining segments are being written, perhaps by a thread that waits for this CPU core.
      sched_yield();
    }
    pause();
  }
}

bool PieceQueue::commit(const PieceSegment& at) {
  uint32_t now = taken(at.segment);
  return pieces_[at.piece].state.compare_exchange_strong(now, committed(at.segment), std::memory_order_acq_rel);
}

void PieceQueue::finish(const PieceSegment& at) {
  pieces_[at.piece].state.store(open(at.segment + 1), std::memory_order_release);
}

PieceSegment PieceQueue::after(const PieceSegment& at) const {
  const int owner = at.piece / pieces_of_thread_, first = owner * pieces_of_thread_;
  const int end = first + pieces_of_thread_ < num_pieces_ ? first + pieces_of_thread_ : num_pieces_;
  return at.piece + 1 < end ? PieceSegment{at.piece + 1, at.segment} : PieceSegment{first, at.segment + 1};
}

}  // namespace engine
