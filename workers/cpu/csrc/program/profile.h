// Measures how much time each operation takes.
#pragma once

#include <chrono>
#include <vector>

namespace engine {

// The seconds spent so far in each operation, and in the choice of tokens after the last one. Operations that threads
// share are timed from the beginning of one to the beginning of the next. In pieces, every thread measures its own
// time.
class Profile {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr int kNoOp = -1;

  explicit Profile(int num_threads) : of_threads_(num_threads) {}

  void add_op() {
    shared_.push_back(0);
    for (auto& seconds : of_threads_) seconds.push_back(0);
  }

  void begin_step() { op_ = kNoOp; }
  // Adds the time since the last call to the operation that began then.
  void end_op() {
    const Clock::time_point now = Clock::now();
    if (op_ != kNoOp) shared_[op_] += std::chrono::duration<double>(now - start_).count();
    start_ = now;
  }
  void begin_op(int op) { op_ = op; }

  void add(int thread, int op, Clock::duration time) {
    of_threads_[thread][op] += std::chrono::duration<double>(time).count();
  }

  std::vector<double> seconds() const {
    std::vector<double> sum = shared_;
    for (const auto& seconds : of_threads_)
      for (size_t op = 0; op < seconds.size(); op++) sum[op] += seconds[op] / double(of_threads_.size());
    return sum;
  }

 private:
  int op_ = kNoOp;
  Clock::time_point start_;
  std::vector<double> shared_ = {0};  // the seconds of each operation, and of the choice of tokens
  std::vector<std::vector<double>> of_threads_;
};

}  // namespace engine
