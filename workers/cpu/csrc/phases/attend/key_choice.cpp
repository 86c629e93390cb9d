#include "phases/attend/key_choice.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace engine {

namespace {

// Returns an integer with the same order as the scores. A NaN has a place in this order too, so that sorting always
// ends.
uint32_t rank_of(float score) {
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof(bits));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Sets the bits [first, end).
void set_bits(uint64_t* words, int first, int end) {
  while (first < end) {
    const int bit = first % kChunk, count = std::min(kChunk - bit, end - first);
    words[first / kChunk] |= ~uint64_t(0) >> (kChunk - count) << bit;
    first += count;
  }
}

// Calls add(candidate) for the `count` highest ranks. Of equal ones, the first win.
template <class Add>
void choose(const uint32_t* ranks, uint32_t* sorted, int num_candidates, int count, Add add) {
  std::copy_n(ranks, num_candidates, sorted);
  std::nth_element(sorted, sorted + count - 1, sorted + num_candidates, [](uint32_t a, uint32_t b) { return a > b; });
  const uint32_t lowest = sorted[count - 1];
  int room = count - int(std::count_if(sorted, sorted + count, [&](uint32_t rank) { return rank > lowest; }));
  for (int i = 0; i < num_candidates; i++)
    if (ranks[i] > lowest || (ranks[i] == lowest && room-- > 0)) add(i);
}

}  // namespace

void KeyChoice::begin_slice() {
  if (!model_.shape.index_dim) return;
  const int32_t* positions = slice_.step.positions + slice_.first_token;
  num_keys_ = 1 + *std::max_element(positions, positions + slice_.num_tokens);
  stride_ = (num_keys_ + kChunk - 1) / kChunk;
  is_limited_ = false;
  words_.reserve(size_t(model_.shape.num_kv_heads) * slice_.num_tokens * stride_ * sizeof(uint64_t));
}

int KeyChoice::begin(const Op& op) {
  is_limited_ = num_keys_ > op.choice.num_keys();
  if (!is_limited_) return 0;
  const int num_rows = slice_.num_tokens, partitions = (num_keys_ + kPartition - 1) / kPartition;
  const int wanted = (kTilesPerThread * model_.shape.num_threads + num_rows - 1) / num_rows;
  // The score of a block must come from a single part.
  num_parts_ = kPartition % op.choice.block_size ? 1 : std::min(partitions, wanted);
  if (num_parts_ > 1) {
    scores_.reserve(sizeof(float) * num_rows * num_choices(op) * most_candidates(op));
    if (num_rows > num_finished_) {
      num_finished_ = num_rows;
      finished_.reset(new std::atomic<int>[num_rows]);
    }
    for (int row = 0; row < num_rows; row++) finished_[row].store(0);
  }
  return num_rows * num_parts_;
}

void KeyChoice::run(const Op& op, Tile& tile, AttentionTask kv_task, int sequence, const Rows& rows, Scratch& scratch) {
  const int row = row_of(tile), part = tile.index % num_parts_, num_heads = num_choices(op);
  const int size = op.choice.block_size, most = most_candidates(op);
  const int count = op.choice.num_candidates(kv_task.position);
  if (kv_task.position < op.choice.num_keys()) {
    if (!tile.commit() || part) return;
    for (int g = 0; g < op.num_kv_heads; g++) std::fill_n(words(g, row), stride_, ~uint64_t(0));
    return;
  }
  const Compression* const compression = op.compression;
  const KVLayout index = (compression ? entries_.copied_layout(op, true) : model_.kv(op)).of_index();
  const int num_queries = compression             ? compression->index_heads
                          : op.latent             ? op.latent->index_heads
                          : op.choice.num_queries ? op.choice.num_queries
                                                  : num_heads;
  const size_t query_words = num_queries * size_t(model_.attention.query_words(index));
  scratch.results.reserve(sizeof(uint32_t) * (size_t(num_heads + 1) * most + query_words));
  float* scores = scratch.results.floats();
  auto *const sorted = reinterpret_cast<uint32_t*>(scores + num_heads * most), *const queries = sorted + most;
  const int partitions = kv_task.position / kPartition + 1;
  const int first = partitions * part / num_parts_, end = partitions * (part + 1) / num_parts_;
  kv_task.first_partition = first;
  kv_task.last_partition = end - 1;
  if (first < end && compression)
    score_entries(op, kv_task, sequence, rows.qkv(row), queries, scratch.copied, scores);
  else if (first < end)
    score(op, kv_task, rows.qkv(row), queries, most, scores);
  if (!tile.commit()) return;
  if (num_parts_ > 1) {
    float* const all = scores_.floats() + size_t(row) * num_heads * most;
    const int from = first * kPartition / size, to = std::min(end * kPartition / size, count);
    for (int g = 0; g < num_heads; g++)
      std::copy(scores + g * most + from, scores + g * most + std::max(from, to), all + g * most + from);
    // The thread that finishes last chooses.
    if (finished_[row].fetch_add(1, std::memory_order_acq_rel) + 1 < num_parts_) return;
    scores = all;
  }
  for (int g = 0; g < num_heads; g++) {
    float* const own_scores = scores + g * most;
    auto* const ranks = reinterpret_cast<uint32_t*>(own_scores);
    for (int i = 0; i < count; i++) ranks[i] = rank_of(own_scores[i]);
    std::fill_n(ranks + count - op.choice.num_local, op.choice.num_local, ~uint32_t(0));
    uint64_t* const chosen = words(g, row);
    std::fill_n(chosen, stride_, uint64_t(0));
    // The choice of entries has a bit for each entry.
    const int bits = compression ? 1 : size;
    choose(ranks, sorted, count, op.choice.num_chosen,
           [&](int i) { set_bits(chosen, i * bits, std::min((i + 1) * bits, stride_ * kChunk)); });
    if (op.choice.has_groups && !compression) set_bits(chosen, count * size, kv_task.position + 1);
  }
  for (int g = num_heads; g < op.num_kv_heads; g++) std::copy_n(words(0, row), stride_, words(g, row));
}

// Scores are not scaled, because that would not change their order.
void KeyChoice::score(const Op& op, const AttentionTask& kv_task, const float* projection, uint32_t* queries,
                      int stride, float* scores) const {
  const AttentionLayer unscaled{1.0f, 1.0f, 0, 0};
  const KVLayout kv = model_.kv(op), index = kv.of_index();
  if (op.latent) {
    const int num_heads = op.latent->index_heads;
    const float* const weights = projection + op.latent->index_offset();
    model_.attention.convert_queries(index, unscaled, weights + num_heads, num_heads, queries);
    if (op.choice.has_groups)
      return model_.attention.score_groups(kv, kv_task, queries, weights, num_heads, op.choice.block_size, scores);
    return model_.attention.score_keys(kv, kv_task, queries, weights, num_heads, scores);
  }
  AttentionTask index_task = kv_task;
  index_task.kv_cache += kv.heads_bytes();
  if (const int num_queries = op.choice.num_queries) {
    model_.attention.convert_queries(index, unscaled, projection + op.first_column, num_queries, queries);
    return model_.attention.score_groups(kv.of_own_index(), index_task, queries, op.vectors[0], num_queries,
                                         op.choice.block_size, scores);
  }
  std::fill_n(scores, op.num_kv_heads * stride, -INFINITY);
  model_.attention.convert_queries(index, unscaled, projection + op.first_column, op.num_kv_heads, queries);
  model_.attention.score_blocks(index, index_task, queries, op.num_kv_heads, op.choice.block_size, stride, scores);
}

void KeyChoice::score_entries(const Op& op, const AttentionTask& kv_task, int sequence, const float* projection,
                              uint32_t* queries, CopiedKeys& copied, float* scores) const {
  const int rate = op.compression->rate, num_heads = op.compression->index_heads;
  const int first = kv_task.first_partition * kPartition / rate;
  const int end =
      std::min((kv_task.last_partition + 1) * kPartition / rate, op.choice.num_candidates(kv_task.position));
  copied.numbers.clear();
  for (int number = first; number < end; number++) copied.numbers.push_back(number);
  if (copied.numbers.empty()) return;
  entries_.copy(op, sequence, true, copied);
  const KVLayout layout = entries_.copied_layout(op, true);
  AttentionTask copies{};
  copies.position = end - first - 1;
  copies.num_tokens = 1;
  copies.last_partition = copies.position / kPartition;
  copies.blocks = copied.blocks.data();
  copies.kv_cache = copied.keys.bytes();
  const float* const weights = projection + op.first_column;
  model_.attention.convert_queries(layout.of_index(), {1.0f, 1.0f, 0}, weights + num_heads, num_heads, queries);
  model_.attention.score_keys(layout, copies, queries, weights, num_heads, scores + first);
}

}  // namespace engine
