// Prefetching of memory that will be read soon, while something else is computed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace engine {

constexpr int kLineBytes = 64;

// A contiguous range of a buffer, in bytes.
struct Run {
  ptrdiff_t offset, bytes;
};

// Several runs of one buffer.
struct Runs {
  const uint8_t* buffer = nullptr;
  const Run *next = nullptr, *end = nullptr;
};

// A thread's progress in prefetching runs, some cache lines at a time. Results do not depend on how far it gets.
class Readahead {
 public:
  static constexpr int kMostLines = 8;

  Readahead() = default;
  // Each step fetches `lines` cache lines, at most kMostLines.
  Readahead(const Runs& first, const Runs& second, int lines) : runs_(first), others_(second), lines_(lines) {}

  // Where the thread reads weights after those of the current product, or nullptr if that is not known.
  const uint8_t* next_weights = nullptr;

  // Continues with the rest of the other runs, and then with the rest of these.
  void turn() {
    std::swap(runs_, others_);
    line_ = end_of_run_;
  }

  // Written as straight code without a call, because the innermost loops contain it.
  inline __attribute__((always_inline)) void step() {
    if (lines_ == 0) return;
    const uint8_t* line = line_;
    if (__builtin_expect(line >= end_of_run_, 0)) {
      if (runs_.next == runs_.end) std::swap(runs_, others_);
      if (runs_.next == runs_.end) {
        lines_ = 0;
        return;
      }
      line = runs_.buffer + runs_.next->offset;
      end_of_run_ = line + runs_.next->bytes;
      runs_.next++;
    }
    switch (lines_) {
      case 8:
        fetch(line + 7 * kLineBytes);
        [[fallthrough]];
      case 7:
        fetch(line + 6 * kLineBytes);
        [[fallthrough]];
      case 6:
        fetch(line + 5 * kLineBytes);
        [[fallthrough]];
      case 5:
        fetch(line + 4 * kLineBytes);
        [[fallthrough]];
      case 4:
        fetch(line + 3 * kLineBytes);
        [[fallthrough]];
      case 3:
        fetch(line + 2 * kLineBytes);
        [[fallthrough]];
      case 2:
        fetch(line + kLineBytes);
        [[fallthrough]];
      case 1:
        fetch(line);
    }
    line_ = line + lines_ * kLineBytes;
  }

 private:
  // Prefetch to the second-level cache, because the first-level cache holds the data of the product.
  static void fetch(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

  Runs runs_, others_;
  const uint8_t *line_ = nullptr, *end_of_run_ = nullptr;
  int lines_ = 0;
};

}  // namespace engine
