// A model's operations, recorded once and run with every step's metadata on a pool of threads.
//
// Long steps run in slices of tokens, each of which passes through all layers before the next one. This makes no
// difference to attention, which reads the keys of earlier slices from the cache. Within a slice, threads either share
// operations one by one, or the slice is divided into pieces that pass through the operations independently (pieces.h).
#pragma once

#include <memory>
#include <vector>

#include "model/expert_exchange.h"
#include "phases/attend/attention.h"
#include "program/decode.h"
#include "phases/experts.h"
#include "phases/head.h"
#include "phases/attend/latent.h"
#include "phases/layer_inputs.h"
#include "phases/mixers/mixers.h"
#include "phases/ngrams.h"
#include "model/model.h"
#include "program/pieces.h"
#include "phases/products.h"
#include "program/profile.h"
#include "model/ranks.h"
#include "program/readahead.h"
#include "model/rope.h"
#include "model/rows.h"
#include "phases/scratch.h"
#include "phases/streams.h"
#include "model/step.h"
#include "runtime/threads.h"

namespace engine {

class Program final : private Phases {
 public:
  explicit Program(const ModelShape& shape);

  // Appends an operation. The arrays to which it points must outlive the program.
  void add(const Op& op);
  // Adds a rotary embedding; see RotaryTables. Operations refer to it by its number.
  void add_rope(const float* inverse_frequencies, int half, float factor, const int32_t* axes, const float* shifts) {
    ropes_.add(inverse_frequencies, half, factor, axes, shifts);
  }

  // Returns the size in bytes of the memory that `num_ranks` programs with the same operations share if they are ranks
  // of one model.
  size_t exchange_bytes(int num_ranks) const { return ranks_.memory_bytes(num_ranks); }
  // Makes this program one of several ranks, which must run the same steps from now on. The memory must outlive it.
  void join(void* memory, int rank, int num_ranks) { ranks_.join(memory, rank, num_ranks); }
  // Divides the experts of every layer among the ranks of an exchange. From now on, all ranks must run rounds at the
  // same time.
  void join_experts(const ExpertExchange& exchange);
  // Takes part in a round of other ranks, without rows of its own.
  void join_round();

  // Runs a step. If num_tokens is 0, only the head runs, on the given `hidden`. Returns false, without doing anything,
  // if a token is not in the vocabulary.
  bool run(const Step& step);
  // Runs a step and appends its tokens. Returns how many could not be sampled, which become token 0. Returns -1,
  // without doing anything, if a slot has no room or its last token is not in the vocabulary.
  int decode(const DecodeBatch& batch);
  // Chooses the tokens of a batch that `chooses_later`. Returns the same as `decode` otherwise does.
  int choose(const DecodeBatch& batch);

  std::vector<double> profile() const { return profile_.seconds(); }

 private:
  int begin(int phase) override;
  void run_tile(int phase, Tile& tile) override;

  // The phases of a slice are its operations, except the head, which runs after the last slice.
  int ops_of_slice() const { return int(model_.ops.size()) - 1; }
  int head_phase() const { return num_slices_ * ops_of_slice(); }
  void begin_slice(int index);
  int begin_op(const Op& op);
  int begin_guest_op(const Op& op);
  void clear_new_blocks();

  int share_rows(const Op& op, int width);
  void run_rows(const Op& op, Tile& tile);
  void run_row(const Op& op, const Rows& rows, int row);
  void embed(const Op& op, int row);
  void drop_masked(const Op& op, float* x, int token);
  void unpack_token(const Op& op, int row, int index, float* out);
  void place(const Op& op, const Rows& rows, int row);
  void norm_shared_activations(const Op& op, float* x, int row) const;
  // Multiplies a normed row by its gate.
  void gate_norm(const NormGate& gate, const Rows& rows, int row) const;
  void clamp(const Op& op, const Rows& rows, int row);
  void write_hidden(const Op& op, const Rows& rows, int row);

  void run_pieces(Tile& tile);
  void run_piece(const PieceSegment& at, int thread, Scratch& scratch);
  bool is_skipped(const Op& op) const { return op.is_optional && skips_optional_; }
  void run_op(const Op& op, const Rows& rows, int end_row, int thread, Scratch& scratch);

  // Declared first, because the others need the number of threads that the system allowed.
  ThreadPool pool_;
  Model model_;
  Slice slice_;
  int num_slices_ = 0;
  uint64_t first_phase_ = 1;  // the number of the step's first phase; no other phase has the same number
  ExpertExchange exchange_{};
  bool is_guest_ = false;       // whether it takes part in a round of other ranks
  Rows rows_;                   // the results of the slice's rows
  std::vector<int> row_tiles_;  // for each operation, the number of tiles that its rows are divided into
  int first_unneeded_ = 1;      // the first operation that only rows with requested results need
  bool shares_blocks_ = false;  // whether layers with other heads, or states, may have used a block before
  bool keeps_states_ = false;   // whether operations replace inputs of layers
  bool skips_optional_ = true;  // whether the step skips operations for sequences with encoder outputs
  std::vector<std::unique_ptr<Scratch>> scratch_;  // one per thread

  RotaryTables ropes_;
  Ranks ranks_;
  Products products_;
  Experts experts_;
  LatentProducts latent_;
  LayerInputs inputs_;
  Streams streams_;
  Attention attention_;
  Mixers mixers_;
  Ngrams ngrams_;
  Pieces pieces_;
  ReadaheadPlan readahead_;
  Head head_;
  DecodeLayout decode_;
  Profile profile_;
};

}  // namespace engine
