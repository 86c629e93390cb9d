// The index keys by which the tokens of a slice choose keys, and those of groups of keys.
#pragma once

#include <vector>

#include "model/model.h"
#include "model/rope.h"
#include "model/step.h"

namespace engine {

class IndexKeys {
 public:
  IndexKeys(const Model& model, const RotaryTables& ropes, const Slice& slice)
      : model_(model), ropes_(ropes), slice_(slice) {}

  // Norms and rotates a row's index queries and index key, and stores the key in the cache. A key that is for a group
  // is only stored.
  void store(const Op& op, float* qkv, int row) const;
  // Replaces the stored index key of a row, if it is the last one of its group of keys, by that of the group: the sum
  // of the group's index keys by the softmax of their logits, in latent attention.
  void summarize_group(const Op& op, float* qkv, int row) const;
  // The same, but by their mean, normed and rotated.
  void average_group(const Op& op, int row) const;

 private:
  // Returns whether a row is the last one of its group.
  bool ends_group(const Op& op, int row) const {
    return (slice_.step.positions[slice_.first_token + row] + 1) % op.choice.block_size == 0;
  }
  // Returns where the blocks of the operation's cache begin, or the index keys in these blocks.
  uint8_t* cache(const Op& op) const { return slice_.step.kv_caches[op.layer]; }
  uint8_t* index_cache(const Op& op) const { return cache(op) + model_.kv(op).heads_bytes(); }
  // Reads what is stored for each token of the group that ends with a row: `count` numbers from element `first` on.
  std::vector<float> read_group(const Op& op, const KVLayout& layout, const uint8_t* cache, int first, int count,
                                int row) const;
  void store_key(const Op& op, const KVLayout& layout, uint8_t* cache, const float* key, int row) const;

  const Model& model_;
  const RotaryTables& ropes_;
  const Slice& slice_;
};

}  // namespace engine
