// The matrix products of a program: how each is divided into tiles, and what is done with its sums.
#pragma once

#include <vector>

#include "program/model.h"
#include "program/ranks.h"
#include "program/rows.h"
#include "program/scratch.h"
#include "runtime/threads.h"

namespace engine {

// A part of a matrix product: rows of the slice, and columns of one of an operation's parts.
struct Columns {
  int first_row, num_rows;
  int part, begin, end;
  int index;  // which of the part's tiles of columns this is
  int size() const { return end - begin; }
};

class Products {
 public:
  Products(const Model& model, const Ranks& ranks, int num_threads)
      : model_(model), ranks_(ranks), num_threads_(num_threads) {}

  void add_op() { tiles_.emplace_back(); }
  // Divides an operation's first `num_parts` parts into tiles; returns their number. The division lasts until the
  // operation begins again.
  int begin(const Op& op, int rows, int num_parts);
  int column_tiles(const Op& op) const { return tiles_of(op).columns[0]; }

  // Returns the rows and columns of a tile of an operation with `rows` rows.
  Columns columns_of(const Op& op, const Tile& tile, int rows) const;
  // Returns where the weights begin that the thread reads after those of a tile, or null if that is not known.
  const uint8_t* weights_after(const Op& op_of_tile, const Tile& tile) const;

  void run_linear(const Op& op, Tile& tile, int num_rows, const Rows& rows, Scratch& scratch) const;
  void run_gated(const Op& op, Tile& tile, int num_rows, const Rows& rows, Scratch& scratch) const;

  // Compute rows [rows.first, end_row) of the slice in this thread alone.
  void compute_linear(const Op& op, const Rows& rows, int end_row, Scratch& scratch) const;
  void compute_gated(const Op& op, const Rows& rows, int end_row, Scratch& scratch) const;

 private:
  // Tiles are numbered by part, by tile of columns, by block of rows.
  struct Tiles {
    int row_blocks, columns[kMaxParts];
  };

  const Tiles& tiles_of(const Op& op) const { return tiles_[model_.index_of(op)]; }
  float* product(const Op& op, const Rows& rows, const Columns& columns, Scratch& scratch) const;
  void write_product(const Op& op, const Rows& rows, const Columns& columns, float* sums) const;
  float* gated_product(const Op& op, const Rows& rows, const Columns& columns, Scratch& scratch) const;
  void write_gated(const Op& op, const Rows& rows, const Columns& columns, float* gate) const;

  const Model& model_;
  const Ranks& ranks_;
  const int num_threads_;
  std::vector<Tiles> tiles_;  // of each operation
};

}  // namespace engine
