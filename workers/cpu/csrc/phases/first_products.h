// The products of rows with the first factors of their LoRA adapters, which the second factors multiply.
//
// They are computed during the phase of the adapted product itself, so that adapters need no phases of their own. Every
// thread begins with its share of the rows, and keeps the results in its own memory. A tile of the product then reads
// the results of its rows. It does not wait for those that another thread has not finished, but computes them, too.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "model/model.h"
#include "model/rows.h"
#include "runtime/buffer.h"

namespace engine {

// The part of a thread in the phase of a product. Later phases have greater numbers. The number is 0 if the thread
// computes rows alone.
struct ProductPhase {
  int thread;
  uint64_t number = 0;
  int num_rows = 0;
};

class FirstProducts {
 public:
  static constexpr int kRowsOfRun = 8;

  explicit FirstProducts(int num_threads)
      : num_threads_(num_threads), of_threads_(std::make_unique<OfThread[]>(num_threads)) {}

  void add_op(const Op& op) { stride_ = std::max(stride_, op.num_parts * op.adapter_rank); }
  // Sets the adapter number of each of the slice's rows, or -1; null if no row has an adapter. No thread may be
  // computing anything.
  void begin_slice(const int32_t* adapters, int num_rows);
  void release();
  // The adapter number of each of the slice's rows, or -1; null if no row has an adapter.
  const int32_t* adapters() const { return adapters_; }

  // Calls run(adapter, first, count) for each run of consecutive rows in [first, end) that have the same adapter. Runs
  // end at multiples of kRowsOfRun.
  template <class Run>
  void for_runs(const Op& op, int first, int end, Run run) const {
    if (!op.adapters || !adapters_) return;
    for (int row = first; row < end;) {
      const int number = adapters_[row], start = row++;
      while (row < end && adapters_[row] == number && row % kRowsOfRun) row++;
      if (number >= 0 && op.adapters[number].down) run(op.adapters[number], start, row - start);
    }
  }
  // Calls run(adapter, first, count) for each run of the thread's share of the slice's rows.
  template <class Run>
  void for_share(const Op& op, const ProductPhase& phase, Run run) const {
    const int begin = int(int64_t(phase.num_rows) * phase.thread / num_threads_);
    const int end = int(int64_t(phase.num_rows) * (phase.thread + 1) / num_threads_);
    for_runs(op, 0, phase.num_rows, [&](const Adapter& adapter, int first, int count) {
      if (begin <= first && first < end) run(adapter, first, count);
    });
  }

  // Computes the thread's share, unless it has done so in this phase.
  void compute_share(const Op& op, const ProductPhase& phase, const Rows& rows);
  // Computes rows [rows.first, end_row) in one thread alone.
  void compute_alone(const Op& op, const Rows& rows, int end_row, int thread);
  // Returns the results of a run for a part of the product. If no thread has them, the thread computes them.
  const float* of_run(const Op& op, int part, const ProductPhase& phase, const Rows& rows, const Adapter& adapter,
                      int first, int count);
  // The number of floats from the results of one row to those of the next.
  int stride() const { return stride_; }

 private:
  // The bits of a thread's number.
  static constexpr int kThreadBits = 16;

  // The results for the slice's rows, and the phase in which the thread last computed its share.
  struct alignas(64) OfThread {
    Buffer results;
    uint64_t phase = 0;
  };
  float* results(int thread, int row) const { return of_threads_[thread].results.floats() + ptrdiff_t(row) * stride_; }
  void multiply(const Op& op, const Rows& rows, const Adapter& adapter, int first, int count, float* out) const;

  const int num_threads_;
  const int32_t* adapters_ = nullptr;
  int stride_ = 0;
  std::unique_ptr<OfThread[]> of_threads_;
  // For the first row of each run: the last phase in which a thread has computed the run, and the thread's number.
  std::unique_ptr<std::atomic<uint64_t>[]> computed_;
  int num_computed_ = 0;
};

}  // namespace engine
