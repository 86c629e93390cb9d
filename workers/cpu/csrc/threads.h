// One pool of threads that runs the phases of a step.
//
// Threads claim tiles one at a time, so that one which loses its processor delays the others by its
// tile and no more. Whoever finishes the last tile of a phase opens the next; nobody waits for threads
// that hold no work. Threads spin for microseconds while a step runs and shortly after it, and sleep
// between steps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace engine {

// Between two looks of a thread that spins.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// A step: phases that follow each other, each of tiles that may run in any order and at once.
class Phases {
 public:
  virtual ~Phases() = default;
  // The number of tiles of the phase, at most kMaxTiles, or -1 if there is no such phase any more. Called
  // once for each, by one thread, after all tiles of the phases before it: what is not worth sharing is
  // done here.
  virtual int begin(int phase) = 0;
  virtual void tile(int phase, int tile, int thread) = 0;
};

constexpr int kMaxTiles = 60000;

class ThreadPool {
 public:
  // The thread that calls run() is one of num_threads.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;

  int num_threads() const { return int(threads_.size()) + 1; }
  // One call at a time.
  void run(Phases& phases);

 private:
  void worker(int thread);
  bool run_a_tile(int thread);
  void open(int phase);

  // Tiles of the phase in the upper half, tiles claimed in the lower. Claiming adds one.
  alignas(64) std::atomic<uint32_t> state_{0};
  alignas(64) std::atomic<int> finished_tiles_{0};
  alignas(64) std::atomic<bool> running_{false};
  std::atomic<int> num_sleeping_{0};
  Phases* phases_ = nullptr;
  int phase_ = 0;
  bool stopping_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace engine
