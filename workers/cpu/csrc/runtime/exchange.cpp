#include "runtime/exchange.h"

#include <atomic>
#include <chrono>

#include "runtime/threads.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#else
#include <sched.h>
#endif

namespace engine {

namespace {

constexpr auto kSpin = std::chrono::microseconds(30);
constexpr int kPausesPerLook = 32;

// Several processes wait on the same word, so these futexes must not be FUTEX_PRIVATE.
void sleep_while(const std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAIT, value, nullptr, nullptr, 0);
#else
  if (word.load(std::memory_order_acquire) == value) sched_yield();
#endif
}

void wake_all([[maybe_unused]] std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

constexpr size_t kMeetingBytes = 256;

}  // namespace

struct Exchange::Meeting {
  alignas(64) std::atomic<uint32_t> num_arrived;
  alignas(64) std::atomic<uint32_t> num_over;
  alignas(64) std::atomic<uint32_t> num_sleeping;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share them");

size_t Exchange::memory_bytes(int num_ranks, size_t part_bytes) {
  static_assert(sizeof(Meeting) <= kMeetingBytes, "the parts follow the meeting");
  return kMeetingBytes + 2 * num_ranks * part_bytes;
}

Exchange::Exchange(void* memory, int rank, int num_ranks, size_t part_bytes)
    : meeting_(static_cast<Meeting*>(memory)),
      parts_(static_cast<uint8_t*>(memory) + kMeetingBytes),
      rank_(rank),
      num_ranks_(num_ranks),
      part_bytes_(part_bytes) {}

void Exchange::meet() {
  const uint32_t before = num_meetings_++;
  std::atomic<uint32_t>& num_over = meeting_->num_over;
  if (meeting_->num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(num_ranks_)) {
    meeting_->num_arrived.store(0, std::memory_order_relaxed);
    // Sequentially consistent, as in the sleeping rank: either that rank sees this store, or the next line sees that it
    // sleeps.
    num_over.store(before + 1, std::memory_order_seq_cst);
    if (meeting_->num_sleeping.load(std::memory_order_seq_cst)) wake_all(num_over);
    return;
  }
  const auto give_up = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerLook; i++) {
      if (num_over.load(std::memory_order_acquire) != before) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < give_up);
  meeting_->num_sleeping.fetch_add(1, std::memory_order_seq_cst);
  while (num_over.load(std::memory_order_seq_cst) == before) sleep_while(num_over, before);
  meeting_->num_sleeping.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace engine
