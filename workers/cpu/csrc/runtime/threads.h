// A pool of threads that runs the phases of a step.
//
// Threads claim tiles one at a time, and the thread that finishes the last tile of a phase opens the next phase. No
// thread waits for idle threads. Neither does any thread wait for one that was descheduled in the middle of a tile:
// another thread computes the same tile, and the first to finish writes it. Threads spin for microseconds while a step
// runs and shortly after it, and sleep between steps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace engine {

// Informs the CPU that the thread is spinning.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// A claim to a tile, made by one of the threads that compute it.
class Tile {
 public:
  Tile(int index, int thread, std::atomic<uint32_t>& committed, uint32_t serial)
      : index(index), thread(thread), committed_(committed), serial_(serial) {}
  Tile(const Tile&) = delete;

  // Returns whether this thread may write the tile. Must be called once, before the first write outside of the thread's
  // own memory. If it returns false, another thread has written the tile. Then the step may be past this phase, so data
  // that this thread has read may be meaningless.
  bool commit() {
    uint32_t open = serial_ - 1;
    is_mine_ = committed_.compare_exchange_strong(open, serial_, std::memory_order_acq_rel);
    return is_mine_;
  }
  bool is_mine() const { return is_mine_; }

  const int index, thread;

 private:
  std::atomic<uint32_t>& committed_;
  const uint32_t serial_;
  bool is_mine_ = false;
};

// A step: a sequence of phases. The tiles of a phase may run in any order and at the same time.
class Phases {
 public:
  virtual ~Phases() = default;
  // Returns the number of tiles of a phase, at most kMaxTiles, or -1 after the last phase. One thread calls it, once
  // per phase, after all tiles of the previous phases have been written. This function computes work that is too small
  // to share itself. Other threads may still compute tiles of earlier phases that were already written. So the memory
  // that these read must stay allocated, whatever it contains, unless ThreadPool::wait_for_others() is called first.
  virtual int begin(int phase) = 0;
  virtual void run_tile(int phase, Tile& tile) = 0;
};

// With this many tiles per thread, all threads finish a phase at about the same time.
constexpr int kTilesPerThread = 4;

constexpr int kTileBits = 22, kMaxTiles = (1 << kTileBits) - 1;

class ThreadPool {
 public:
  // The thread that calls run() is one of the `num_threads` threads. There are fewer if the system refuses to start
  // some.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;

  int num_threads() const { return int(threads_.size()) + 1; }
  // Runs all phases. Only one call may run at a time. When it returns, no thread is computing anything.
  void run(Phases& phases);
  // Waits until no other thread is computing anything. Only Phases::begin() may call it.
  void wait_for_others();

 private:
  // Each flag has its own cache line, so that threads do not contend for it.
  struct alignas(64) Flag {
    std::atomic<bool> is_set{false};
  };

  void worker(int thread);
  bool run_a_tile(int thread);
  bool repeat_a_tile(int thread);
  void compute(uint32_t serial, int num_tiles, int index, int thread);
  void open(int phase, int thread);

  // From the highest bit: the phase's serial number, its number of tiles (kTileBits), the number of claims (kTileBits).
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> finished_tiles_{0};
  alignas(64) std::atomic<bool> running_{false};
  std::atomic<int> num_sleeping_{0};
  Phases* phases_ = nullptr;
  uint32_t first_serial_ = 1, next_serial_ = 1;  // the serial numbers of the step's first phase, and after its last
  int opener_ = 0;
  // For each tile, the phase's serial number if the tile is committed, and one less if it is not.
  std::unique_ptr<std::atomic<uint32_t>[]> committed_;
  std::unique_ptr<Flag[]> is_computing_;
  bool stopping_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace engine
