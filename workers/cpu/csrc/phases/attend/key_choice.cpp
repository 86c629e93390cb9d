#include "phases/attend/key_choice.h"

#include <algorithm>
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

// Sets the bits of the `count` highest ranks. Of equal ones, the first win.
void choose(const uint32_t* ranks, uint32_t* sorted, int num_keys, int count, uint64_t* words) {
  std::copy_n(ranks, num_keys, sorted);
  std::nth_element(sorted, sorted + count - 1, sorted + num_keys, [](uint32_t a, uint32_t b) { return a > b; });
  const uint32_t lowest = sorted[count - 1];
  int room = count - int(std::count_if(sorted, sorted + count, [&](uint32_t rank) { return rank > lowest; }));
  for (int key = 0; key < num_keys; key++) {
    const bool is_chosen = ranks[key] > lowest || (ranks[key] == lowest && room-- > 0);
    words[key / kChunk] |= uint64_t(is_chosen) << key % kChunk;
  }
}

}  // namespace

void KeyChoice::begin_slice() {
  if (!model_.shape.latent.index_dim) return;
  const int32_t* positions = slice_.step.positions + slice_.first_token;
  num_keys_ = 1 + *std::max_element(positions, positions + slice_.num_tokens);
  stride_ = (num_keys_ + kChunk - 1) / kChunk;
  is_limited_ = false;
  words_.reserve(size_t(slice_.num_tokens) * stride_ * sizeof(uint64_t));
}

int KeyChoice::begin(const Op& op) {
  is_limited_ = num_keys_ > op.num_columns;
  return is_limited_ ? slice_.num_tokens : 0;
}

void KeyChoice::run(const Op& op, Tile& tile, const AttentionTask& kv_task, const Rows& rows, Scratch& scratch) {
  const LatentShape& latent = model_.shape.latent;
  const int num_keys = kv_task.position + 1, padded = stride_ * kChunk;
  const KVLayout kv = model_.kv(op), index = kv.of_index();
  const size_t num_words = size_t(latent.index_heads) * model_.attention.query_words(index);
  scratch.results.reserve(sizeof(uint64_t) * stride_ + sizeof(uint32_t) * (2 * size_t(padded) + num_words));
  auto* const chosen = reinterpret_cast<uint64_t*>(scratch.results.bytes());
  if (num_keys <= op.num_columns) {
    std::fill_n(chosen, stride_, ~uint64_t(0));
  } else {
    auto* const scores = reinterpret_cast<float*>(chosen + stride_);
    auto *const sorted = reinterpret_cast<uint32_t*>(scores + padded), *const queries = sorted + padded;
    const float* weights = rows.qkv(tile.index) + model_.shape.index_offset();
    // Do not scale the scores, because that would not change their order.
    model_.attention.convert_queries(index, AttentionLayer{1.0f, 1.0f, 0}, weights + latent.index_heads,
                                     latent.index_heads, queries);
    model_.attention.score_keys(kv, kv_task, queries, weights, latent.index_heads, scores);
    auto* const ranks = reinterpret_cast<uint32_t*>(scores);
    for (int key = 0; key < num_keys; key++) ranks[key] = rank_of(scores[key]);
    std::fill_n(chosen, stride_, uint64_t(0));
    choose(ranks, sorted, num_keys, op.num_columns, chosen);
  }
  if (tile.commit()) std::copy_n(chosen, stride_, words(tile.index));
}

}  // namespace engine
