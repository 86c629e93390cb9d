// The entries of compressed attention; see Compression.
//
// Inputs and entries are stored row by row, an entry before its index key. A block has a row for each token or, in a
// cache of entries, for each entry that may end in it. Attention reads keys in another layout, so they are copied
// first.
#pragma once

#include <cstdint>
#include <vector>

#include "model/model.h"
#include "model/rope.h"
#include "model/step.h"
#include "runtime/buffer.h"

namespace engine {

// Keys, or index keys, in blocks of kChunk keys, in the layout of a cache without values.
struct CopiedKeys {
  Buffer keys;
  std::vector<int32_t> blocks;   // the block table of the copies
  std::vector<int32_t> visible;  // the ranges of keys to which tokens attend, as in AttentionTask
  std::vector<int32_t> numbers;  // the numbers of the entries
};

class Entries {
 public:
  Entries(const Model& model, const RotaryTables& ropes, const Slice& slice)
      : model_(model), ropes_(ropes), slice_(slice) {}

  // Stores a row's inputs behind the keys of its block.
  void store_inputs(const Op& op, int row, const float* inputs) const;
  // Computes and stores the entry whose last token is the row's, if there is one. Inputs are read from the cache, so
  // the result does not depend on which of them are from this step. If a token is replaced later, as after a rejected
  // draft, its entry is, too.
  void store(const Op& op, int row, int sequence) const;

  // Copies entries, or their index keys, given their numbers in the sequence.
  void copy(const Op& op, int sequence, bool are_index_keys, CopiedKeys& out) const;
  KVLayout copied_layout(const Op& op, bool are_index_keys) const;

 private:
  // Returns the layout of a row of elements.
  KVLayout row_layout(int size) const { return {model_.shape.kv_format, 1, size, 1, 0, false, 0}; }
  // Returns the address of a row of `size` elements in the block of a position of a sequence.
  uint8_t* address(int layer, int group, int sequence, int position, size_t first_element, int row, int size) const;
  uint8_t* entry(const Op& op, int sequence, int number) const;
  // Writes the sum of the tokens' values [tokens, size], each element times a softmax over the tokens of its logit plus
  // bias, normed and rotated. Tokens have `stride` inputs. Of overlapping entries, the first one of a sequence has half
  // of the tokens, which begin with `first_token`.
  void summarize(const Op& op, const float* inputs, int stride, int first_token, int size, const float* biases,
                 const float* norm, const RotaryTables::Angles& angles, float* out) const;

  const Model& model_;
  const RotaryTables& ropes_;
  const Slice& slice_;
};

}  // namespace engine
