// The matrix products of a program: how each is divided into tiles, and how its sums are used.
#pragma once

#include <vector>

#include "model/model.h"
#include "model/ranks.h"
#include "model/rows.h"
#include "phases/first_products.h"
#include "phases/scratch.h"
#include "runtime/threads.h"

namespace engine {

// A part of a matrix product: rows of the slice, and columns of one of an operation's parts.
struct Columns {
  int first_row, num_rows;
  int part, begin, end;
  int index;  // the number of the tile of columns within the part
  int size() const { return end - begin; }
};

// Returns the number of tiles into which the columns of a matrix are divided, for products of `rows` rows.
int column_tiles(const PackedWeight& w, int at_least, int rows);
// Returns where the columns of a tile begin. Wider tiles come first, so that those computed last are small.
int column_bound(const PackedWeight& w, int tile, int tiles);
// Returns where the weights of columns from `column` on begin.
const uint8_t* weights_at(const PackedWeight& w, int column);

// The matrices of a gated product and their biases, or null. If `up` is null, there is no gate. The gate is multiplied
// by a factor before its activation, which is the layer's own if there is a `xielu`. If there are `row_factors`, each
// row's sums are those of its input times its factor.
struct GatedWeights {
  const PackedWeight *gate, *up;
  const float *gate_bias, *up_bias;
  float factor = 1.0f;
  const Xielu* xielu = nullptr;
  const float* row_factors = nullptr;
  GateLimit limit{};
};

// The adapters' changes to a product: the adapters by number, or null, and the slice's row for each row of the product.
struct RowChanges {
  const Adapter* adapters = nullptr;
  const int* rows = nullptr;
};

class Products {
 public:
  Products(const Model& model, const Ranks& ranks, int num_threads)
      : model_(model), ranks_(ranks), num_threads_(num_threads), first_products_(num_threads) {}

  void add_op(const Op& op) {
    tiles_.emplace_back();
    first_products_.add_op(op);
  }
  // Sets the adapter number of each of the slice's rows, or -1; null if no row has an adapter. No thread may be
  // computing anything.
  void begin_slice(const int32_t* adapters, int num_rows) { first_products_.begin_slice(adapters, num_rows); }
  void release() { first_products_.release(); }
  // Divides an operation's first `num_parts` parts into tiles, and returns their number. The division is valid until
  // the operation begins again.
  int begin(const Op& op, int rows, int num_parts);
  int column_tiles(const Op& op) const { return tiles_of(op).columns[0]; }

  // Returns the rows and columns of a tile of an operation with `rows` rows.
  Columns columns_of(const Op& op, const Tile& tile, int rows) const;
  // Returns where the weights begin that the thread will read after those of a tile, or null if that is not known.
  const uint8_t* weights_after(const Op& op_of_tile, const Tile& tile) const;
  // Returns where the weights of tile number `tile` begin, or null if that is not known. Tiles are counted from the
  // first tile of an operation through those of the operations that follow.
  const uint8_t* weights_from(const Op* op, int index) const;

  // Return columns [begin, end) of the sums, without gaps, in the thread's memory: of a product, with its bias if not
  // null, and of a gated product, with its activation.
  float* sums(const PackedWeight& weight, const float* bias, ActivationKind kind, const uint8_t* x, int num_rows,
              int begin, int end, Scratch& scratch, const RowChanges& changes = {}) const;
  float* gated_sums(const GatedWeights& weights, ActivationKind kind, const uint8_t* x, int num_rows, int begin,
                    int end, Scratch& scratch, const RowChanges& changes = {}) const;

  void run_linear(const Op& op, Tile& tile, const ProductPhase& phase, const Rows& rows, Scratch& scratch);
  void run_gated(const Op& op, Tile& tile, const ProductPhase& phase, const Rows& rows, Scratch& scratch);

  // Sends the mean and the squares of this rank's gates of a row to the other ranks.
  void share_gates(const Op& op, const Rows& rows, int row) const;
  // Writes the activations of a row, for an MLP whose gates are in the projection.
  void sparse_gates(const Op& op, const Rows& rows, int row) const;

  // Compute rows [rows.first, end_row) of the slice in one thread alone.
  void compute_linear(const Op& op, const Rows& rows, int end_row, int thread, Scratch& scratch);
  void compute_gated(const Op& op, const Rows& rows, int end_row, int thread, Scratch& scratch);

 private:
  void exceed_threshold(const Op& op, float* gates, int row) const;

  // Tiles are numbered by part, then by tile of columns, then by block of rows.
  struct Tiles {
    int row_blocks, columns[kMaxParts], total;
  };

  // Returns the readahead of factors, which are fetched during a product, because each adapter's are read in one short
  // run: the second factors of columns of parts [part, end_part), and some of the first factors of the thread's share
  // in the next product.
  Readahead factors_of(const Op& op, const Tile& tile, const ProductPhase& phase, int end_part, const Columns& columns,
                       Scratch& scratch) const;
  // Adds the adapters' changes to the sums of `num_parts` parts in the thread's memory. Every tile of columns
  // multiplies by the first factors again.
  void add(const RowChanges& changes, ActivationKind kind, const uint8_t* x, int num_rows, int num_parts, int begin,
           int end, Scratch& scratch) const;
  // Adds the adapters' changes to the sums of one part.
  void add_changes(const Op& op, int part, const ProductPhase& phase, const Rows& rows, const Columns& columns,
                   float* sums);
  float* product(const Op& op, const ProductPhase& phase, const Rows& rows, const Columns& columns, Scratch& scratch);
  float* gated_product(const Op& op, const ProductPhase& phase, const Rows& rows, const Columns& columns,
                       Scratch& scratch);
  void multiply_gated(const GatedWeights& weights, ActivationKind kind, const uint8_t* x, int num_rows, int begin,
                      int end, Scratch& scratch) const;
  // The sum of some gates, and the sum of the squares of their differences from their mean.
  struct Moments {
    float sum, squares;
  };
  Moments moments(const float* gates, int count) const;
  float* activate(const GatedWeights& weights, int num_rows, int begin, int end, Scratch& scratch) const;
  // gate = sigmoid(gate) times the factors of the product, which are capped softly; `up` is overwritten.
  void soft_cap_gate(float* gate, float* up, int n) const;
  const Tiles& tiles_of(const Op& op) const { return tiles_[model_.index_of(op)]; }
  void write_product(const Op& op, const Rows& rows, const Columns& columns, float* sums) const;
  void write_gated(const Op& op, const Rows& rows, const Columns& columns, float* gate) const;

  const Model& model_;
  const Ranks& ranks_;
  const int num_threads_;
  std::vector<Tiles> tiles_;  // one per operation
  FirstProducts first_products_;
};

}  // namespace engine
