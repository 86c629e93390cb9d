// Memory that will be read soon, brought into the caches while something else is computed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine {

constexpr int kLineBytes = 64;

// What lies together, from the beginning of a buffer.
struct Run {
  ptrdiff_t offset, bytes;
};

// A thread's way through runs, some lines at a time. Nothing depends on how far it comes.
class Readahead {
 public:
  static constexpr int kMostLines = 8;

  Readahead() = default;
  // At most kMostLines at a time.
  Readahead(const uint8_t* buffer, const Run* first, const Run* end, int lines)
      : buffer_(buffer), next_(first), end_(end), lines_(lines) {}

  // Straight code without a call: it stands in the innermost loops.
  inline __attribute__((always_inline)) void step() {
    if (lines_ == 0) return;
    const uint8_t* line = line_;
    if (__builtin_expect(line >= end_of_run_, 0)) {
      if (next_ == end_) {
        lines_ = 0;
        return;
      }
      line = buffer_ + next_->offset;
      end_of_run_ = line + next_->bytes;
      next_++;
    }
    switch (lines_) {
      case 8: fetch(line + 7 * kLineBytes); [[fallthrough]];
      case 7: fetch(line + 6 * kLineBytes); [[fallthrough]];
      case 6: fetch(line + 5 * kLineBytes); [[fallthrough]];
      case 5: fetch(line + 4 * kLineBytes); [[fallthrough]];
      case 4: fetch(line + 3 * kLineBytes); [[fallthrough]];
      case 3: fetch(line + 2 * kLineBytes); [[fallthrough]];
      case 2: fetch(line + kLineBytes); [[fallthrough]];
      case 1: fetch(line);
    }
    line_ = line + lines_ * kLineBytes;
  }

 private:
  // Into the second cache: the first one has the product's.
  static void fetch(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

  const uint8_t* buffer_ = nullptr;
  const Run *next_ = nullptr, *end_ = nullptr;
  const uint8_t *line_ = nullptr, *end_of_run_ = nullptr;
  int lines_ = 0;
};

}  // namespace engine
