#include "phases/first_products.h"

#include "linear/linear.h"
#include "runtime/readahead.h"

namespace engine {

void FirstProducts::begin_slice(const int32_t* adapters, int num_rows) {
  adapters_ = adapters;
  if (!adapters) return;
  for (int i = 0; i < num_threads_; i++) of_threads_[i].results.reserve(sizeof(float) * num_rows * stride_);
  if (num_rows <= num_computed_) return;
  computed_ = std::make_unique<std::atomic<uint64_t>[]>(num_rows);
  num_computed_ = num_rows;
}

void FirstProducts::release() {
  for (int i = 0; i < num_threads_; i++) of_threads_[i].results.release();
}

void FirstProducts::compute_share(const Op& op, const ProductPhase& phase, const Rows& rows) {
  uint64_t& last = of_threads_[phase.thread].phase;
  if (last == phase.number) return;
  last = phase.number;
  for_share(op, phase,
            [&](const Adapter& adapter, int first, int count) { of_run(op, 0, phase, rows, adapter, first, count); });
}

void FirstProducts::compute_alone(const Op& op, const Rows& rows, int end_row, int thread) {
  for_runs(op, rows.first, end_row, [&](const Adapter& adapter, int first, int count) {
    multiply(op, rows, adapter, first, count, results(thread, first));
  });
}

// A thread writes only to its own memory, and publishes its number when the results are there. A slow thread, whose
// phase is over, may read results that are being overwritten, but must not replace the number of a later phase.
const float* FirstProducts::of_run(const Op& op, int part, const ProductPhase& phase, const Rows& rows,
                                   const Adapter& adapter, int first, int count) {
  const int column = part * (adapter.down->n / op.num_parts);
  float* const own = results(phase.thread, first);
  if (phase.number == 0) return own + column;
  std::atomic<uint64_t>& computed = computed_[first];
  const uint64_t in_phase = phase.number << kThreadBits;
  uint64_t last = computed.load(std::memory_order_acquire);
  if (last >> kThreadBits == phase.number) return results(int(last - in_phase), first) + column;
  multiply(op, rows, adapter, first, count, own);
  while (last < in_phase && !computed.compare_exchange_weak(last, in_phase + uint64_t(phase.thread))) {
  }
  return own + column;
}

void FirstProducts::multiply(const Op& op, const Rows& rows, const Adapter& adapter, int first, int count,
                             float* out) const {
  const PackedWeight& down = *adapter.down;
  const int rank = down.n / op.num_parts;
  const uint8_t* const x = rows.activations(op.source, first, activation_row_bytes(op.input_kind, down.k));
  Readahead none;
  for (int part = 0, end; part < op.num_parts; part = end + 1) {
    for (end = part; end < op.num_parts && adapter.up[end].rank;) end++;
    if (part < end)
      linear_rows(down, op.input_kind, x, count, part * rank, end * rank, out + part * rank, stride_, none);
  }
}

}  // namespace engine
