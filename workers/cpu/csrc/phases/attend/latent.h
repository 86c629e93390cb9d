// The products of latent attention with a matrix per head: from a head's plain query to a latent query (with the matrix
// that expands keys), and from attention's latent result to the head's value.
#pragma once

#include "model/model.h"
#include "model/rows.h"
#include "phases/scratch.h"
#include "runtime/threads.h"

namespace engine {

class LatentProducts {
 public:
  explicit LatentProducts(const Model& model) : model_(model) {}

  // Divides an operation into tiles of one head and some rows each, and returns their number.
  int begin(const Op& op, int rows) const { return op.num_heads * row_blocks(op, rows); }
  void run(const Op& op, Tile& tile, int num_rows, const Rows& rows, Scratch& scratch) const;
  // Computes rows [rows.first, end_row) of the slice in this thread alone.
  void compute(const Op& op, const Rows& rows, int end_row, Scratch& scratch) const;

 private:
  struct Block {
    int head, first_row, num_rows;
  };

  int rows_of_block(const Op& op) const;
  int row_blocks(const Op& op, int rows) const;
  // Returns the sums of a block, without gaps, in the thread's memory.
  float* product(const Op& op, const Rows& rows, const Block& block, Scratch& scratch) const;
  void write(const Op& op, const Rows& rows, const Block& block, float* sums) const;

  const Model& model_;
};

}  // namespace engine
