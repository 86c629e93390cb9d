// A barrier and buffers in shared memory, for the ranks that divide every layer.
//
// Each rank writes its part, all ranks meet, and each reads the parts of all. There are two sets of parts, which are
// used alternately. Before a rank writes to a set again, there has been another meeting, which the other ranks entered
// only after they had read the set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine {

class Exchange {
 public:
  static size_t memory_bytes(int num_ranks, size_t part_bytes);
  // The memory must be aligned to 64 bytes, and zero before the first rank is constructed.
  Exchange(void* memory, int rank, int num_ranks, size_t part_bytes);

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  size_t part_bytes() const { return part_bytes_; }
  // Returns this rank's part, to be written before the next meeting.
  uint8_t* own_part() const { return part(num_meetings_ + 1, rank_); }
  // Returns what a rank has written before the last meeting. It is valid until this rank enters the next one.
  const uint8_t* part_of(int rank) const { return part(num_meetings_, rank); }
  // Waits until all ranks have called it. It spins for microseconds and then sleeps.
  void meet();

 private:
  struct Meeting;

  uint8_t* part(uint32_t meeting, int rank) const {
    return parts_ + (size_t(meeting & 1) * num_ranks_ + rank) * part_bytes_;
  }

  Meeting* const meeting_;
  uint8_t* const parts_;
  const int rank_, num_ranks_;
  const size_t part_bytes_;
  uint32_t num_meetings_ = 0;
};

}  // namespace engine
