// The recurrent layers of a program.
//
// A block of the cache holds the state after the last computed of its tokens. A recurrence is computed in segments of
// tokens at fixed positions: the state has the recurrent part at the start of the last segment, and the inputs since
// then and before it as many as the convolution reads. So a token is always computed by the same operations, however a
// prompt is divided into steps and slices.
//
// Work is divided by sequence, and by channel or head. Tiles are committed before they are computed, because they
// change the state in place: each is computed once.
#pragma once

#include <vector>

#include "model/model.h"
#include "model/ranks.h"
#include "model/rows.h"
#include "model/step.h"
#include "runtime/buffer.h"
#include "runtime/threads.h"

namespace engine {

class Mixers {
 public:
  Mixers(const Model& model, const Ranks& ranks, const Slice& slice, int num_threads)
      : model_(model), ranks_(ranks), slice_(slice), num_threads_(num_threads) {}

  void add_op(const Op& op);
  bool are_any() const { return are_any_; }
  // Begins a slice. No thread may be computing anything of the previous one.
  void begin_slice();

  // Returns the number of tiles of a short convolution, a convolution or a scan; 0 if it was computed in this thread.
  int begin(const Op& op, const Rows& rows);
  void run(const Op& op, Tile& tile, const Rows& rows, Buffer& memory);
  // Sends the sum of squares of a row to the other ranks. The row is gated first if the gate comes before the norm.
  void share_squares(const Op& op, const Rows& rows, int row) const;
  // Writes the activations of a row, from the outputs of a scan.
  void gate(const Op& op, const Rows& rows, int row) const;

  // Returns how many rows of the slice are before a row in its sequence.
  int rows_before(int row) const { return row - sequence_of(row).first_row; }
  // Returns the stored input of the token that is `distance` before a row's, and before the slice.
  const float* stored_input(const Op& op, int row, int distance) const;

 private:
  // The tokens of one sequence in the slice.
  struct Sequence {
    int index, first_row, num_rows;
    int position;         // the position of the first token
    int num_earlier;      // tokens of its segment before it
    int first_convolved;  // the row in `convolved_` of the first token of its segment
  };
  // The state of a sequence before the slice, or null, and its state after the slice. They may be the same memory.
  struct State {
    const float* source;
    float* target;
  };
  // Access to the inputs of some channels, by the number of tokens since the start of the sequence's first segment.
  class Inputs;

  const Sequence& sequence_of(int row) const { return sequences_[slice_.sequence_of(row) - slice_.first_sequence]; }
  void norm(const Op& op, float* out, int row) const;
  void gate_before_norm(const Mixer& mixer, const Rows& rows, int row) const;
  void run_part(const Op& op, int part, const Rows& rows, Buffer& memory);
  State state(const Op& op, const Sequence& sequence) const;
  void convolve_shortly(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows,
                        Buffer& memory) const;
  void convolve_heads(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows,
                      Buffer& memory) const;
  void convolve_inside(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows,
                       Buffer& memory) const;
  void convolve_ngrams(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows,
                       Buffer& memory) const;
  void convolve(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows, Buffer& memory) const;
  void scan(const Op& op, const Sequence& sequence, int begin, int end, const Rows& rows, Buffer& memory) const;
  void scan_mamba2(const Mixer& mixer, const Sequence& sequence, const State& state, int begin, int end,
                   const Rows& rows, Buffer& memory) const;
  void scan_mamba1(const Mixer& mixer, const Sequence& sequence, const State& state, int begin, int end,
                   const Rows& rows, Buffer& memory) const;
  void scan_rg_lru(const Mixer& mixer, const Sequence& sequence, const State& state, int begin, int end,
                   const Rows& rows, Buffer& memory) const;
  void scan_delta_net(const Mixer& mixer, const Sequence& sequence, const State& state, int begin, int end,
                      const Rows& rows, Buffer& memory) const;

  const Model& model_;
  const Ranks& ranks_;
  const Slice& slice_;
  const int num_threads_;
  bool are_any_ = false;
  int segment_ = 1, channels_ = 0;
  std::vector<Sequence> sequences_;
  int num_parts_ = 1;  // the parts of each sequence, in the current operation
  // The convolved inputs of all segments, [tokens, channels].
  Buffer convolved_;
  Buffer own_memory_;
};

}  // namespace engine
