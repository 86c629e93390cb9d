// Memory that will be read soon, brought into the caches while something else is computed.
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

// A thread's way through runs, some lines at a time. Nothing depends on how far it comes.
class Readahead {
 public:
  static constexpr int kMostLines = 8;

  Readahead() = default;
  // At most kMostLines at a time.
  Readahead(const Runs& first, const Runs& second, int lines) : runs_(first), others_(second), lines_(lines) {}

  // Where the thread reads weights once it is through those of a product; nullptr if that is not known.
  const uint8_t* next_weights = nullptr;

  // To what is left of the second runs, and from there back to the first.
  void turn() {
    std::swap(runs_, others_);
    line_ = end_of_run_;
  }

  // Straight code without a call: it stands in the innermost loops.
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

  Runs runs_, others_;
  const uint8_t *line_ = nullptr, *end_of_run_ = nullptr;
  int lines_ = 0;
};

}  // namespace engine
