#include "threads.h"

#include <sched.h>

#include <chrono>

namespace engine {

namespace {

constexpr int kSpinsBeforeYield = 4000;
constexpr auto kSpinAfterStep = std::chrono::microseconds(50);

inline int claimed(uint32_t state) { return int(state & 0xffff); }
inline int total(uint32_t state) { return int(state >> 16); }

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { worker(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

// Only one thread is in here at a time, and none holds a tile.
void ThreadPool::open(int phase) {
  int tiles;
  while ((tiles = phases_->begin(phase)) == 0) phase++;
  phase_ = phase;
  finished_tiles_.store(0, std::memory_order_relaxed);
  if (tiles < 0)
    running_.store(false, std::memory_order_release);
  else
    state_.store(uint32_t(tiles) << 16, std::memory_order_release);
}

bool ThreadPool::run_a_tile(int thread) {
  // Looking first keeps the count of claims from running away.
  uint32_t state = state_.load(std::memory_order_acquire);
  if (claimed(state) >= total(state)) return false;
  // Whatever phase this claims from cannot end before the tile does: its fields stand still.
  state = state_.fetch_add(1, std::memory_order_acq_rel);
  if (claimed(state) >= total(state)) return false;
  const int phase = phase_;
  phases_->tile(phase, claimed(state), thread);
  if (finished_tiles_.fetch_add(1, std::memory_order_acq_rel) + 1 == total(state)) open(phase + 1);
  return true;
}

void ThreadPool::run(Phases& phases) {
  phases_ = &phases;
  running_.store(true);
  open(0);
  if (num_sleeping_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  int spins = 0;
  while (running_.load(std::memory_order_acquire)) {
    if (run_a_tile(0)) {
      spins = 0;
    } else if (++spins < kSpinsBeforeYield) {
      pause();
    } else {
      sched_yield();
    }
  }
}

void ThreadPool::worker(int thread) {
  using Clock = std::chrono::steady_clock;
  constexpr int kSpinsPerLook = 64;
  Clock::time_point idle_since = Clock::now();
  int spins = 0;
  for (;;) {
    if (run_a_tile(thread)) {
      spins = 0;
      continue;
    }
    if (++spins < kSpinsBeforeYield)
      pause();
    else
      sched_yield();
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
