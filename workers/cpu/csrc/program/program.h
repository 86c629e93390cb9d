// A model's operations, recorded once and replayed with every step's metadata.
//
// Long steps run in slices of tokens, each through all layers before the next, so that what is between
// two operations stays small; attention makes no difference between a slice and a step.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "sampling/draft_lookup.h"
#include "runtime/exchange.h"
#include "linear/linear.h"
#include "runtime/piece_queue.h"
#include "runtime/readahead.h"
#include "rows/kernels.h"
#include "sampling/token_chooser.h"
#include "runtime/threads.h"

namespace engine {

// The sizes of a rank's part of a model; heads and intermediate size are its share.
struct ModelShape {
  int32_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size;
  int32_t block_size;
  KVFormat kv_format;
  Activation activation;
  int32_t num_threads;
};

enum class OpKind : int32_t {
  embed = 0,         // residual = row of parts[0], or else of hidden, * scale; and the rotary tables.
                     // Where there are ranks: part = row of parts[0], if it has the token's; residual = 0
  quantize = 1,      // activations[0] = residual, normed by vectors[0] if there is one
  linear = 2,        // target = activations[source] * parts + vectors
  gated_linear = 3,  // activations[1] = activation(gate) * up, of parts and vectors
  rotate_store = 4,  // norms and rotates queries and keys, stores queries, keys and values for the attention after
  attention = 5,     // activations[1] = attention
  norm_add = 6,      // residual += scale * block normed by vectors[0]
  final_norm = 7,    // hidden = residual, normed by vectors[0] if there is one
  head = 8,          // logits of the rows asked for; the last operation
  sum = 9,           // target = the parts of all ranks, in their order, + vectors[0] if there is one
};

// Adds scale * y to residual. The part is what this rank has of a sum.
enum class LinearTarget : int32_t { qkv = 0, residual = 1, block = 2, part = 3 };
enum class QKNorm : int32_t { none = 0, head = 1, full = 2 };

constexpr int kMaxParts = 3;
constexpr int kSliceTokens = 512;

constexpr int kTilesPerThread = 4;
// Floats in a thread's buffer for the sums of a tile.
constexpr int kTileFloats = 16384;

// Bytes of the processor's last-level cache, or 0 if unknown.
ptrdiff_t last_cache_bytes();

struct Op {
  OpKind kind;
  ActivationKind input_kind;       // of the activations it reads
  ActivationKind activation_kind;  // of those it writes
  int32_t source;
  LinearTarget target;
  int32_t layer, group;  // of the KV cache
  int32_t rope;          // index, or -1
  QKNorm qk_norm;
  int32_t num_parts;
  float scale, eps;
  AttentionLayer attention;
  const PackedWeight* parts[kMaxParts];  // side by side
  const float* vectors[kMaxParts];       // of each part, or null
};

// The block table [rows, stride] and the slot of each token in one KV-cache group.
struct StepGroup {
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* slot_mapping;
};

struct Step {
  int32_t num_tokens, num_sequences, num_logit_rows;
  int32_t wants_all_hidden;        // or only the rows of `logit_rows`
  const int32_t* input_ids;        // [num_tokens]
  const int32_t* positions;        // [num_tokens]
  const int32_t* query_start_loc;  // [num_sequences + 1]
  const int64_t* table_rows;       // [num_sequences], of the block tables; null if they are in order
  const StepGroup* groups;
  uint8_t* const* kv_caches;  // of each layer
  float* hidden;              // [num_tokens, hidden_size]
  const int32_t* logit_rows;  // [num_logit_rows], of hidden; null if `logits` are given
  float* logits;              // [num_logit_rows, vocab_size], or null
  int32_t* tokens;            // [num_logit_rows], as TokenChooser gives them, or null
  const SamplingRows* sampling;  // null for the most likely tokens
};

// A step in which each request computes its last token and drafts, and samples one token after each verified draft.
// It reads and advances the worker's state of every slot.
struct DecodeBatch {
  int32_t num_slots, num_groups;
  int32_t chooses_later;  // tokens are chosen by `choose`, once the grammar is known
  const int64_t* slots;  // [num_slots]
  int64_t max_model_len;
  int32_t* token_ids;            // [slots, max_model_len]
  int32_t* num_tokens;           // [slots]
  int32_t* num_computed_tokens;  // [slots], one less
  const int32_t* const* block_tables;  // of each group, [slots, block_table_stride]
  int64_t block_table_stride;
  uint8_t* const* kv_caches;     // of each layer
  const SamplingRows* sampling;  // but for its positions; null for the most likely tokens
  const int32_t* num_drafts;  // [num_slots], at most so many are verified; null for none
  DraftLookup* lookup;        // has the drafts, and gets those of the next step; null for none
  int32_t* tokens;            // [num_slots and drafts], as TokenChooser gives them: those that count
  int32_t* num_sampled;       // [num_slots], of these tokens
  int32_t* num_verified;      // [num_slots], drafts that there were
};

class Program final : private Phases {
 public:
  explicit Program(const ModelShape& shape);
  // The arrays that an operation points to must outlive the program.
  void add(const Op& op);
  // Angles are position * inverse_frequencies[half]; `factor` multiplies their sines and cosines.
  void add_rope(const float* inverse_frequencies, int half, float factor);
  // Bytes of memory that `num_ranks` programs with the same operations share to be ranks of one model.
  size_t exchange_bytes(int num_ranks) const;
  // The memory must outlive the program. From then on all ranks run the same steps.
  void join(void* memory, int rank, int num_ranks);
  // With num_tokens = 0 only the head runs, on the `hidden` given. Returns false, having done nothing,
  // if a token is not in the vocabulary.
  bool run(const Step& step);
  // Appends the tokens it samples, token 0 where that could not be, and returns how often it could not;
  // or -1, having done nothing, if a slot has no room or its last token is not in the vocabulary.
  int decode(const DecodeBatch& batch);
  // Chooses the tokens of a batch that `chooses_later`.
  int choose(const DecodeBatch& batch);
  // Seconds spent in each operation so far, and in the choice of tokens after the last.
  std::vector<double> profile() const;

 private:
  struct Rope {
    std::vector<float> inverse_frequencies;
    float factor;
    std::vector<float> tables;  // [slice tokens][cosines, sines]
  };
  struct Task {
    int sequence, token, num_tokens;  // the token of the slice
    int kv_head, first_partition, last_partition;
    int first_slot, slot, num_slots;  // of partial states, if there is more than one to combine
    int64_t cost;
  };
  // The tasks of a slice, shared by the layers with the same window.
  struct TaskList {
    int window;
    bool is_made;
    std::vector<Task> tasks;
    std::vector<int> first_tasks;  // of each tile, and the end of the last
    int num_slots;
  };
  struct FoundRuns {
    std::vector<Run> runs;
    ptrdiff_t bytes;
  };
  // What is fetched before a piece's keys and values are stored in a layer's cache, and before its attention: the same
  // for all layers with the same blocks and window.
  struct PieceRuns {
    FoundRuns stored, attended;
  };
  struct RunList {
    int group, window;
    bool is_made;
    std::vector<PieceRuns> pieces;
  };
  // The operations from one attention to the next, and their weights.
  struct Segment {
    int first_op, end_op;
    int64_t weights = 0;
    ptrdiff_t bytes = 0;
    int rows_at_once = 64;  // at most
  };
  // The largest logit of a tile; a negative index is a NaN.
  struct Best {
    float logit;
    int32_t index;
  };
  // Returns the better of two neighbors, the first one if they are equal.
  static Best likelier(const Best& first, const Best& second) {
    return first.index >= 0 && (second.index < 0 || second.logit > first.logit) ? second : first;
  }
  // A buffer that is aligned to 64 bytes and only grows.
  class Buffer {
   public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    ~Buffer();
    void reserve(size_t bytes);
    uint8_t* bytes() const { return data_; }
    float* floats() const { return reinterpret_cast<float*>(data_); }

   private:
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
  };

  // Intermediate results between operations, for rows of the slice from `first` on.
  struct Rows {
    explicit Rows(const ModelShape& shape);
    void reserve(int rows);
    float* residual(int row) const { return residual_.floats() + (row - first) * hidden_size_; }
    float* block(int row) const { return block_.floats() + (row - first) * hidden_size_; }
    float* qkv(int row) const { return qkv_.floats() + (row - first) * qkv_size_; }
    // Rows of `row_bytes`.
    uint8_t* activations(int source, int row, size_t row_bytes) const {
      return activations_[source].bytes() + (row - first) * row_bytes;
    }

    int first = 0;

   private:
    Buffer residual_, block_, qkv_, activations_[2];
    size_t hidden_size_, qkv_size_, widest_;
  };
  struct Scratch {
    Scratch(int max_rows, const KVLayout& kv, const ModelShape& shape);
    AttentionScratch attention;
    std::unique_ptr<float[]> tile;
    TokenChooser chooser;
    Buffer results;  // of the attention tasks of a tile
    Rows rows;       // of a piece
    std::vector<Task> tasks;
    std::vector<AttentionTask> attention_tasks;
    Readahead readahead;
    std::vector<double> profile;
  };
  // Some of a matrix product: rows of the slice, and columns of one of an operation's parts.
  struct Columns {
    int first_row, num_rows;
    int part, begin, end;
    int size() const { return end - begin; }
  };
  // How an operation is divided into tiles, until the next slice.
  struct Shares {
    int row_tiles;
    int row_blocks, column_tiles[kMaxParts];
    const TaskList* tasks;
  };

  int begin(int phase) override;
  void run_tile(int phase, Tile& tile) override;

  bool lay_out(const DecodeBatch& batch);
  const SamplingRows* rows_to_sample(const DecodeBatch& batch);
  int advance(const DecodeBatch& batch);
  void begin_slice(int slice);
  int begin_op(const Op& op, Shares& shares);
  int begin_head(const Op& op, Shares& shares);
  int begin_attention(const Op& op, Shares& shares);
  int share_rows(const Op& op, int width, Shares& shares);
  int share_columns(const Op& op, int rows, int num_parts, Shares& shares);
  void run_row(const Op& op, const Rows& rows, int row);
  void run_rows(const Op& op, const Shares& shares, Tile& tile);
  const uint8_t* weights_after(const Op& op_of_tile, const Shares& shares, const Tile& tile) const;
  void run_linear(const Op& op, const Shares& shares, Tile& tile);
  void run_gated(const Op& op, const Shares& shares, Tile& tile);
  float* product(const Op& op, const Rows& rows, const Columns& columns, Scratch& scratch);
  void write_product(const Op& op, const Rows& rows, const Columns& columns, float* sums);
  float* gated_product(const Op& op, const Rows& rows, const Columns& columns, Scratch& scratch);
  void write_gated(const Op& op, const Rows& rows, const Columns& columns, float* gate);
  void run_head(const Op& op, const Shares& shares, Tile& tile);
  void run_attention(const Op& op, const Shares& shares, Tile& tile);
  AttentionTask attention_task(const Op& op, const Task& task) const;
  size_t result_bytes(const Op& op, const Task& task) const;
  void attend(const Op& op, const Task& task, const AttentionTask& attention, Scratch& scratch,
              uint8_t* result);
  void finish_attention(const Op& op, const Task& task, const AttentionState& total, Scratch& scratch,
                        uint8_t* activations);
  void write_attention(const Op& op, const Task& task, uint8_t* result, Scratch& scratch);
  void copy_attention(const Op& op, const Rows& rows, const Task& task, const uint8_t* result) const;
  void embed(const Op& op, int row);
  void rotate_store(const Op& op, float* qkv, int row);
  void norm_heads(const Op& op, float* heads, int num_heads, const float* weight);
  const TaskList& tasks_of(const Op& op);
  void make_tasks(TaskList& list);
  void make_tiles(TaskList& list) const;
  void make_runs();
  std::deque<RunList>::iterator runs_of(const Op& op);
  void find_stored(FoundRuns& runs, const Op& op, int first_row, int end_row) const;
  void find_attended(FoundRuns& runs, const Op& op, int first_row, int end_row);
  Readahead readahead_for(const PieceSegment& at);
  void find_tasks(int window, int first_row, int end_row, std::vector<Task>& tasks) const;

  int count_pieces() const;
  bool reads_own_keys();
  void find_segments();
  int first_row(int piece) const { return int(int64_t(num_tokens_) * piece / num_pieces_); }
  // Whether more is wanted of these rows of the slice than the keys and values that each layer stores.
  bool is_wanted(int first_row, int end_row) const;
  bool is_needed(const PieceSegment& at) const;
  void run_pieces(Tile& tile);
  void run_piece(const PieceSegment& at, Scratch& scratch);
  void run_op(const Op& op, const Rows& rows, int end_row, Scratch& scratch);
  void attend_rows(const Op& op, const Rows& rows, int end_row, Scratch& scratch);
  size_t part_bytes(int num_ranks) const;
  template <class Write, class Read>
  void exchange_rows(int rows, size_t row_bytes, Write write, Read read);
  void gather_logits();
  void exchange_winners();
  void sum_parts(const Op& op, int row);
  Best most_likely(int row) const;
  void take_most_likely();
  void choose_token(Tile& tile);

  // The part of a row's sum that this rank writes, and what another has written.
  float* own_part(int row) const {
    return reinterpret_cast<float*>(exchange_->own_part()) + size_t(row) * shape_.hidden_size;
  }
  const float* part_of(int rank, int row) const {
    return reinterpret_cast<const float*>(exchange_->part_of(rank)) +
           size_t(row) * shape_.hidden_size;
  }
  // The first token of a rank's share of the vocabulary.
  int first_token_of(int rank) const {
    return exchange_ ? int(int64_t(shape_.vocab_size) * rank / exchange_->num_ranks()) : 0;
  }
  float* logit_maxima(int row) const {
    return logit_maxima_.floats() + size_t(row) * logit_blocks(shape_.vocab_size);
  }
  Best* bests() const { return reinterpret_cast<Best*>(best_.bytes()); }
  // Of the query heads that share a key/value head, as the attention kernels read them.
  uint32_t* queries(int kv_head, int row) const;
  size_t partial_floats() const;
  AttentionState partial_state(float* floats) const;

  const ModelShape shape_;
  const KVLayout kv_;
  const AttentionKernels& attention_;
  const RowKernels& rows_;
  const int qkv_size_;
  std::vector<Op> ops_;
  std::vector<Rope> ropes_;
  std::deque<TaskList> task_lists_;
  std::deque<RunList> run_lists_;
  std::vector<Task> found_tasks_;  // by the thread that begins an operation
  std::vector<Segment> segments_;
  int num_groups_ = 0;
  PieceQueue pieces_;
  Rows slice_rows_;
  Buffer queries_;  // of the slice, by key/value head
  Buffer head_activations_, partial_, best_;
  Buffer logits_, logit_maxima_;  // of rows that are not sampled by the most likely token
  Buffer own_logits_;             // of this rank's share of the vocabulary
  std::unique_ptr<Exchange> exchange_;  // null where there are no other ranks
  std::vector<Best> winners_;     // of each row that takes its most likely token
  Buffer decode_hidden_;
  std::vector<int32_t> decode_starts_, decode_arrays_;
  std::vector<int64_t> decode_slots_;
  std::vector<StepGroup> decode_groups_;
  SamplingRows decode_sampling_{};
  std::vector<std::unique_ptr<Scratch>> scratch_;
  std::unique_ptr<std::atomic<int>[]> finished_slots_;
  size_t num_finished_slots_ = 0;

  // Of the step, the slice and the operation at hand.
  Step step_{};
  int num_slices_ = 0, slice_ = 0;
  int first_token_ = 0, num_tokens_ = 0;  // of the slice
  int first_sequence_ = 0;                // with tokens in the slice
  std::vector<Shares> shares_;            // of each operation
  int num_pieces_ = 0;                    // of the slice, or 0 if operations are shared out one by one
  std::vector<int32_t> filled_blocks_;    // of the slice and a group
  int timed_op_ = -1;
  std::chrono::steady_clock::time_point op_start_;
  std::vector<double> profile_ = {0};

  ThreadPool pool_;
};

}  // namespace engine
