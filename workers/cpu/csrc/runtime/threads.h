// One pool of threads that runs the phases of a step.
//
// Threads claim tiles one at a time, and the thread that finishes the last tile of a phase opens the next. None waits
// for threads without work, nor for one that has lost its processor in the middle of a tile: another computes the tile
// as well, and the first to be done writes it. Threads spin for microseconds while a step runs and shortly after it,
// and sleep between steps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
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

// A tile in the hands of one of the threads that compute it.
class Tile {
 public:
  Tile(int index, int thread, std::atomic<uint32_t>& committed, uint32_t serial)
      : index(index), thread(thread), committed_(committed), serial_(serial) {}
  Tile(const Tile&) = delete;

  // To be asked once, before the first write outside of this thread's own memory: whether it may write. If not, another
  // thread has written the tile. The step may then be past this phase, and what this thread has read meaningless.
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

// A step: phases that follow each other, each of tiles that may run in any order and at once.
class Phases {
 public:
  virtual ~Phases() = default;
  // The number of tiles of the phase, at most kMaxTiles, or -1 if there is no such phase any more. Called
  // once for each, by one thread, after all tiles of the phases before it have been written: what is not worth
  // sharing is done here. Threads may still compute tiles of those phases, in vain: the memory that these read must
  // stay valid, whatever is in it, unless ThreadPool::wait_for_others() is called first.
  virtual int begin(int phase) = 0;
  virtual void run_tile(int phase, Tile& tile) = 0;
};

constexpr int kTileBits = 22, kMaxTiles = (1 << kTileBits) - 1;

class ThreadPool {
 public:
  // The thread that calls run() is one of num_threads, or of fewer, if the system refuses some.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;

  int num_threads() const { return int(threads_.size()) + 1; }
  // One call at a time. When it returns no thread computes anything.
  void run(Phases& phases);
  // From Phases::begin(): until no other thread computes anything.
  void wait_for_others();

 private:
  // On a cache line of its own.
  struct alignas(64) Flag {
    std::atomic<bool> is_set{false};
  };

  void worker(int thread);
  bool run_a_tile(int thread);
  bool repeat_a_tile(int thread);
  void compute(uint32_t serial, int num_tiles, int index, int thread);
  void open(int phase, int thread);

  // From the highest bit: the phase's serial number, kTileBits of its number of tiles, kTileBits of those claimed.
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> finished_tiles_{0};
  alignas(64) std::atomic<bool> running_{false};
  std::atomic<int> num_sleeping_{0};
  Phases* phases_ = nullptr;
  uint32_t first_serial_ = 1, next_serial_ = 1;  // of the step's phases, and after its last
  int opener_ = 0;
  // Of each tile: the phase's serial number once it is committed, and one less before.
  std::unique_ptr<std::atomic<uint32_t>[]> committed_;
  std::unique_ptr<Flag[]> is_computing_;
  bool stopping_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace engine
