// Operations on the single heads of a row's queries and keys: norms, bounds, scales, rotations and means.
#pragma once

#include "model/model.h"
#include "model/ranks.h"
#include "model/rope.h"
#include "model/step.h"

namespace engine {

class Heads {
 public:
  Heads(const Model& model, const Ranks& ranks, const RotaryTables& ropes, const Slice& slice)
      : model_(model), ranks_(ranks), ropes_(ropes), slice_(slice) {}

  // Sends the sums of squares of a row's queries and keys to the other ranks.
  void share_squares(const Op& op, const float* qkv, int row) const;
  void norm_queries_and_keys(const Op& op, float* qk, int row) const;
  // Multiplies heads by `scales`, if there are any, and limits the norm of each.
  void limit_norms(float* heads, int num_heads, int size, const float* scales, float bound) const;
  // Scales queries by the factor of the row's position, if the operation has one.
  void scale_queries(const Op& op, float* queries, int size, int row) const;
  // Returns the values of a row, normed and placed after its keys; null if there are none.
  const float* place_values(const Op& op, float* qkv) const;
  // Norms, scales and rotates heads.
  void rotate(const Op& op, float* qkv, int row) const;
  // Writes the means of the queries and keys that share a head.
  void average(const Op& op, float* qkv) const;

 private:
  // Norms each head, or all of them as one vector.
  void norm_equal(const Op& op, float* heads, int num_heads, const float* weight) const;
  // Norms heads by the sums of squares over all ranks, which are at `index` in the ranks' parts.
  void norm_over_ranks(const Op& op, float* heads, int num_heads, int index, int row) const;

  const Model& model_;
  const Ranks& ranks_;
  const RotaryTables& ropes_;
  const Slice& slice_;
};

}  // namespace engine
