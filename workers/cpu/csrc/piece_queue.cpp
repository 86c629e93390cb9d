#include "piece_queue.h"

#include <sched.h>

#include "threads.h"

namespace engine {

namespace {

// A few times what is between the ends of two threads that have their processors.
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

template <class Condition>
int PieceQueue::furthest_behind(int thread, Condition condition) const {
  int best = -1, best_segment = num_segments_;
  for (int piece = 0; piece < num_pieces_; piece++) {
    const uint32_t now = state(piece);
    const int segment = int(now / 3);
    const bool is_better =
        segment < best_segment || (segment == best_segment && best >= 0 && !is_owned(thread, best) && is_owned(thread, piece));
    if (segment < num_segments_ && is_better && condition(piece, now) && is_possible(piece, segment)) {
      best = piece;
      best_segment = segment;
    }
  }
  return best;
}

bool PieceQueue::take(int thread, PieceSegment& next) {
  for (int spins = 1;; spins++) {
    int piece = furthest_behind(thread, [](int, uint32_t now) { return now % 3 == 0; });
    if (piece >= 0) {
      uint32_t now = state(piece);
      next = {piece, int(now / 3)};
      if (now % 3 == 0 && next.segment < num_segments_ &&
          pieces_[piece].state.compare_exchange_strong(now, now + 1, std::memory_order_acq_rel))
        return true;
      continue;
    }
    bool is_done = true;
    for (piece = 0; piece < num_pieces_; piece++) is_done &= state(piece) >= open(num_segments_);
    if (is_done) return false;
    if (spins % kSpinsBeforeRepeat == 0) {
      piece = furthest_behind(thread, [](int, uint32_t now) { return now % 3 == 1; });
      const uint32_t now = piece < 0 ? 0 : state(piece);
      next = {piece, int(now / 3)};
      if (now % 3 == 1) return true;
      // All that is left is being written, perhaps by one who waits for this processor.
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
