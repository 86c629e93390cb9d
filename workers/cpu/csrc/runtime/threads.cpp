#include "runtime/threads.h"

#include <sched.h>

#include <chrono>
#include <system_error>

namespace engine {

namespace {

// The number of spins before a thread sleeps: more than it needs at the end of a phase if every thread has a CPU core.
constexpr int kSpinsBeforeRepeat = 1000;
constexpr int kSpinsBeforeYield = 4000;
constexpr auto kSpinAfterStep = std::chrono::microseconds(50);

// The number of serial numbers. They repeat, but a phase has ended long before its number is used again.
constexpr uint32_t kSerials = 1u << (64 - 2 * kTileBits);

inline int claimed(uint64_t state) { return int(state & kMaxTiles); }
inline int total(uint64_t state) { return int(state >> kTileBits & kMaxTiles); }
inline uint32_t serial_of(uint64_t state) { return uint32_t(state >> (2 * kTileBits)); }
inline int phase_of(uint32_t serial, uint32_t first_serial) { return int((serial - first_serial) % kSerials); }

inline void wait_a_moment(int spins) {
  if (spins < kSpinsBeforeYield)
    pause();
  else
    sched_yield();
}

}  // namespace

ThreadPool::ThreadPool(int num_threads)
    : committed_(new std::atomic<uint32_t>[kMaxTiles]), is_computing_(new Flag[num_threads]) {
  try {
    for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { worker(i); });
  } catch (const std::system_error&) {
    // The system allows no more threads. Those that have started share the work.
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

// Only one thread at a time runs this: the one that finished the last tile.
void ThreadPool::open(int phase, int thread) {
  opener_ = thread;
  int tiles;
  while ((tiles = phases_->begin(phase)) == 0) phase++;
  const uint32_t serial = (first_serial_ + uint32_t(phase)) % kSerials;
  if (tiles < 0) {
    next_serial_ = (serial + 1) % kSerials;
    // With no tiles in the state, none can be claimed once the step is over.
    state_.store(uint64_t(serial) << (2 * kTileBits));
    running_.store(false, std::memory_order_release);
    return;
  }
  for (int i = 0; i < tiles; i++) committed_[i].store(serial - 1, std::memory_order_relaxed);
  finished_tiles_.store(0, std::memory_order_relaxed);
  state_.store(uint64_t(serial) << (2 * kTileBits) | uint64_t(tiles) << kTileBits);
}

void ThreadPool::compute(uint32_t serial, int num_tiles, int index, int thread) {
  const int phase = phase_of(serial, first_serial_);
  Tile tile(index, thread, committed_[index], serial);
  phases_->run_tile(phase, tile);
  // The phase cannot end before this thread has counted its tile.
  if (tile.is_mine() && finished_tiles_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_tiles)
    open(phase + 1, thread);
}

bool ThreadPool::run_a_tile(int thread) {
  // This check keeps the number of claims from overflowing its bits.
  uint64_t state = state_.load(std::memory_order_acquire);
  if (claimed(state) >= total(state)) return false;
  // Must be set before the claim, because run() returns only when no thread can have claimed a tile.
  std::atomic<bool>& is_computing = is_computing_[thread].is_set;
  is_computing.store(true);
  state = state_.fetch_add(1);
  const bool has_tile = claimed(state) < total(state);
  if (has_tile) compute(serial_of(state), total(state), claimed(state), thread);
  is_computing.store(false, std::memory_order_release);
  return has_tile;
}

bool ThreadPool::repeat_a_tile(int thread) {
  std::atomic<bool>& is_computing = is_computing_[thread].is_set;
  is_computing.store(true);
  const uint64_t state = state_.load();
  const uint32_t serial = serial_of(state);
  const int tiles = total(state);
  int tile = 0;
  while (tile < tiles && committed_[tile].load(std::memory_order_acquire) != serial - 1) tile++;
  const bool has_tile = tile < tiles;
  if (has_tile) compute(serial, tiles, tile, thread);
  is_computing.store(false, std::memory_order_release);
  return has_tile;
}

void ThreadPool::wait_for_others() {
  for (int i = 0; i < num_threads(); i++)
    for (int spins = 0; i != opener_ && is_computing_[i].is_set.load(); spins++) wait_a_moment(spins);
}

void ThreadPool::run(Phases& phases) {
  phases_ = &phases;
  first_serial_ = next_serial_;
  running_.store(true);
  open(0, 0);
  if (num_sleeping_.load() > 0) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
  }
  int spins = 0;
  while (running_.load(std::memory_order_acquire)) {
    if (run_a_tile(0) || (++spins % kSpinsBeforeRepeat == 0 && repeat_a_tile(0)))
      spins = 0;
    else
      wait_a_moment(spins);
  }
  opener_ = 0;
  wait_for_others();
}

void ThreadPool::worker(int thread) {
  using Clock = std::chrono::steady_clock;
  constexpr int kSpinsPerLook = 64;
  Clock::time_point idle_since = Clock::now();
  int spins = 0;
  for (;;) {
    if (run_a_tile(thread) || (++spins % kSpinsBeforeRepeat == 0 && repeat_a_tile(thread))) {
      spins = 0;
      continue;
    }
    wait_a_moment(spins);
    if (spins % kSpinsPerLook) continue;
    if (running_.load(std::memory_order_relaxed)) {
      idle_since = Clock::now();
    } else if (Clock::now() - idle_since > kSpinAfterStep) {
      std::unique_lock<std::mutex> lock(mutex_);
      num_sleeping_.fetch_add(1);
      wake_.wait(lock, [this] { return stopping_ || running_.load(); });
      num_sleeping_.fetch_sub(1);
      if (stopping_) return;
      spins = 0;
    }
  }
}

}  // namespace engine
