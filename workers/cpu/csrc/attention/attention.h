// Paged attention.
//
// A row is one query head of one token. Its keys are divided into partitions of kPartition keys, and these into chunks
// of kChunk keys, both at multiples of their size from the start of the sequence. Each partition has one running
// softmax, and partitions are combined in order. So the result of a row depends only on its query, its keys and values
// and its window, and not on which rows are computed together or by which thread.
#pragma once

#include "attention/kv_cache.h"
#include "runtime/readahead.h"

namespace engine {

constexpr int kChunk = 64;
constexpr int kPartition = 1024;
// The maximum number of rows that are computed together, unless a single token has more query heads.
constexpr int kTaskRows = 64;

struct AttentionLayer {
  float scale;
  float softcap;  // 0 for none
  // The tokens that a token sees, including itself; 0 for all. In chunks, it is -2 * the size of a chunk, and 1 less if
  // a token also sees the chunk before its own.
  int32_t window;
  int32_t rounds_alibi;  // DistanceBiases depend on the distance from position 0 to a key instead
};

// Numbers that are added to scores, depending on the distance from a token to a key.
struct DistanceBiases {
  const float* values;  // [query heads][2 * zero + kMargin], or null; times log2(e)
  int zero;             // the column of a token's own key, and the maximum number of tokens of a sequence

  // The margin after the last column: kernels read whole chunks, for up to kTaskRows tokens that attend to the chunk's
  // last key.
  static constexpr int kMargin = 128;

  // Returns a pointer to the numbers for a key `distance` positions before a token (negative if the key is after it),
  // and for the keys that follow.
  const float* of(int head, int distance) const {
    return values + size_t(head) * (2 * zero + kMargin) + zero + distance;
  }
};

// Numbers that are added to scores, depending on the query and on the distance to the key: a query has `rank` factors,
// and their products with a column of the table are summed. Keys further away get nothing.
struct QueryBiases {
  const float* factors;  // of the first token's heads, [query heads][rank], or null
  size_t stride;         // the number of floats from one token's factors to the next token's
  const float* table;    // [rank][kMargin + num_distances + kMargin], the furthest distance first; times log2(e)
  int rank, num_distances;

  // The margin contains zeros: kernels read whole chunks.
  static constexpr int kMargin = kChunk;
};

// The query heads that share one key/value head, for consecutive tokens of one sequence.
struct AttentionTask {
  const uint32_t* queries;  // [num_tokens][num_heads][query_words]
  int position;             // the position of the first token
  int num_tokens;
  int num_keys;            // the number of keys that every token sees, or 0 if each sees the keys up to its own
  const int32_t* visible;  // [num_tokens][2], as in Step; or null
  int num_heads;           // the number of heads that share the key/value head
  int kv_head;
  int first_partition, last_partition;  // inclusive
  const int32_t* blocks;                // the blocks of the sequence
  const uint8_t* kv_cache;
  const AttentionTask* next;  // the task that this thread computes next, or null
  uint8_t* copied_values;     // the thread's memory for the values of a chunk; unused if the cache has values
  DistanceBiases biases;
  QueryBiases query_biases;
  // [num_tokens][chosen_stride], a bit for each key, in words of a chunk; null if tokens attend to all keys
  const uint64_t* chosen;
  int chosen_stride;
};

// The number of parts in which the sum of a row is kept.
constexpr int kSumParts = 16;

// The running softmax of each row over the keys processed so far.
struct AttentionState {
  float* maximum;  // [rows], the maximum of the scores times log2(e)
  float* sum;      // [rows][kSumParts]
  float* values;   // [rows][padded value_dim], the weighted sum of values
};

// The memory that a thread needs for a task.
struct AttentionScratch {
  AttentionScratch(int max_rows, const KVLayout& layout);
  AttentionScratch(const AttentionScratch&) = delete;
  ~AttentionScratch();

  AttentionState part, total;
  uint8_t* copied_values;

 private:
  float* memory_;
};

// Returns the position of the first key to which a token at a position attends.
inline int first_key(int position, int window) {
  if (window < 0) {
    const int size = -window / 2, start = position - position % size;
    return -window % 2 && start ? start - size : start;
  }
  return window && position + 1 > window ? position + 1 - window : 0;
}

// Returns the end of the range of keys to which a token attends: after its own position, or, if it also attends to
// later keys of its sequence with `num_keys` keys, the end of its window.
inline int end_key(int position, int window, int num_keys) {
  if (!num_keys) return position + 1;
  return window > 0 && position + window < num_keys ? position + window : num_keys;
}

// The same for a token of a task. `visible` extends its range, or limits the end if it begins after the token.
inline int first_key(const AttentionTask& task, int window, int token) {
  const int key = first_key(task.position + token, window);
  return task.visible && task.visible[2 * token] < key ? task.visible[2 * token] : key;
}

inline int end_key(const AttentionTask& task, int window, int token) {
  const int position = task.position + token, end = end_key(position, window, task.num_keys);
  if (!task.visible) return end;
  const int first = task.visible[2 * token], seen = task.visible[2 * token + 1];
  return first > position && end < seen ? end : seen;
}

// The kernels for one format of the KV cache.
struct AttentionKernels {
  // Returns the number of 32-bit words of a query in the kernels' format.
  int (*query_words)(const KVLayout&);
  // Prefetches the first keys that `task` will read.
  void (*fetch)(const KVLayout&, const AttentionLayer&, const AttentionTask& task);
  // Computes the task's partitions one after the other and writes their combination to `total`.
  void (*attend)(const KVLayout&, const AttentionLayer&, const AttentionTask&, AttentionScratch&,
                 const AttentionState& total);
  // Adds the next partition to `total`.
  void (*combine)(const AttentionState& total, const AttentionState& part, int rows, int padded_value_dim);
  // Divides the sums of values by the sums of weights, and writes out[row][value_dim].
  void (*finish)(const AttentionState& total, int rows, int value_dim, float* out);
  // Converts queries, [num_heads][head_dim], to [num_heads][query_words].
  void (*convert_queries)(const KVLayout&, const AttentionLayer&, const float* queries, int num_heads, uint32_t* out);
  // Stores the key and value of one head of a token, [head_dim] each. The value is ignored if the cache has only keys.
  void (*store)(const KVLayout&, uint8_t* kv_cache, int block, int offset, int kv_head, const float* key,
                const float* value);
  // Writes the scores by which the task's one token chooses keys, for each key up to its own in the task's partitions.
  // The scores of the rest of the last chunk are undefined. `queries`, [num_heads][query_words], are converted for the
  // layout `of_index`.
  void (*score_keys)(const KVLayout&, const AttentionTask&, const uint32_t* queries, const float* weights,
                     int num_heads, float* out);
  // The same for groups of `group_size` keys, of which each has the index key that is stored with its last token.
  // Writes out[group] for all groups that end at or before the task's token and whose last token is in its partitions,
  // and up to kChunk undefined scores behind them.
  void (*score_groups)(const KVLayout&, const AttentionTask&, const uint32_t* queries, const float* weights,
                       int num_heads, int group_size, float* out);
  // Reads `count` elements of a token's stored key, from element `first` on, index key and what is behind it included.
  void (*load)(const KVLayout&, const uint8_t* kv_cache, int block, int offset, int first, int count, float* out);
  // Raises out[head][block] to the largest product of the head's query and a key of the block, of the same keys. Blocks
  // have `block_size` keys, and heads are `stride` numbers apart.
  void (*score_blocks)(const KVLayout&, const AttentionTask&, const uint32_t* queries, int num_heads, int block_size,
                       int stride, float* out);
};

// attention_kernels() returns the kernels by KVFormat.
#define ENGINE_ISA(set, linear, attention, ...) \
  namespace attention {                         \
  const AttentionKernels* attention_kernels();  \
  }
#include "isa/instruction_sets.inc"

}  // namespace engine
