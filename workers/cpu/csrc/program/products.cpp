#include "program/products.h"

#include <algorithm>

#include "linear/bf16_block.h"
#include "linear/packed_layout.h"

namespace engine {

namespace {

constexpr int kRowBlock = 64;
// With this many rows tiles are cut smaller, so that all threads end at about the same time.
constexpr int kManyRows = 16;
constexpr int kTileWeights = 1 << 18;

// Columns are divided in units that are whole groups of activations. Units are larger if there are many columns, and
// for the formats whose kernels read several tiles at once.
int unit_columns(const PackedWeight& w, int tiles) {
  return !is_integer(w.format) || w.n >= 16 * kColumnTile * tiles ? 4 * kColumnTile : 2 * kColumnTile;
}
// Where the columns of a tile begin. Wider tiles come first, so that those computed last are small.
int column_bound(const PackedWeight& w, int tile, int tiles) {
  const int unit = unit_columns(w, tiles);
  const int units = (w.n + unit - 1) / unit;
  return std::min((units / tiles * tile + std::min(units % tiles, tile)) * unit, w.n);
}
int widest_tile(const PackedWeight& w, int tiles) {
  const int unit = unit_columns(w, tiles);
  const int units = (w.n + unit - 1) / unit;
  return (units + tiles - 1) / tiles * unit;
}

const uint8_t* weights_at(const PackedWeight& w, int column) {
  return w.format == WeightFormat::bf16 ? bf16_block(w, column / kBF16BlockColumns)
                                        : w.data + tile_at(w.format, w.k, column / kColumnTile);
}

// Calls run(columns) for all columns of a part, as many at a time as have their sums in a thread's buffer.
template <class Run>
void for_columns(const Op& op, int part, const Rows& rows, int end_row, Run run) {
  const int num_rows = end_row - rows.first, n = op.parts[part]->n;
  const int width = std::max(kTileFloats / num_rows / 64 * 64, 64);
  for (int begin = 0; begin < n; begin += width)
    run(Columns{rows.first, num_rows, part, begin, std::min(begin + width, n), 0});
}

}  // namespace

int Products::begin(const Op& op, int rows, int num_parts) {
  Tiles& tiles = tiles_[model_.index_of(op)];
  tiles.row_blocks = (rows + kRowBlock - 1) / kRowBlock;
  const int tiles_per_thread = rows < kManyRows ? kTilesPerThread : 2 * kTilesPerThread;
  const int wanted = (tiles_per_thread * num_threads_ + tiles.row_blocks - 1) / tiles.row_blocks;
  const int widest = kTileFloats / std::min(rows, kRowBlock);
  int64_t columns = 0;
  for (int i = 0; i < num_parts; i++) columns += op.parts[i]->n;
  int total = 0;
  for (int i = 0; i < num_parts; i++) {
    const int n = op.parts[i]->n;
    const int share = int((int64_t(n) * wanted + columns - 1) / columns);
    const int by_size = int(int64_t(n) * op.parts[i]->k / kTileWeights);
    int& column_tiles = tiles.columns[i];
    column_tiles = std::max({share, by_size, 1});
    while (widest_tile(*op.parts[i], column_tiles) > widest) column_tiles++;
    total += column_tiles;
  }
  return total * tiles.row_blocks;
}

Columns Products::columns_of(const Op& op, const Tile& tile, int rows) const {
  const Tiles& tiles = tiles_of(op);
  Columns columns;
  columns.first_row = tile.index % tiles.row_blocks * kRowBlock;
  columns.num_rows = std::min(rows - columns.first_row, kRowBlock);
  columns.part = 0;
  columns.index = tile.index / tiles.row_blocks;
  while (columns.index >= tiles.columns[columns.part]) columns.index -= tiles.columns[columns.part++];
  const PackedWeight& weight = *op.parts[columns.part];
  columns.begin = column_bound(weight, columns.index, tiles.columns[columns.part]);
  columns.end = column_bound(weight, columns.index + 1, tiles.columns[columns.part]);
  return columns;
}

// Most of the time threads take tiles in turn, those of this product and then those of the products that follow.
// Products that have not begun are expected to be divided as in the step before.
const uint8_t* Products::weights_after(const Op& op_of_tile, const Tile& tile) const {
  if (tiles_of(op_of_tile).row_blocks > 1) return nullptr;
  int index = tile.index + num_threads_;
  for (const Op* op = &op_of_tile; op <= &model_.ops.back(); op++) {
    const bool has_weights = op->kind == OpKind::linear || op->kind == OpKind::gated_linear || op == &model_.ops.back();
    const int num_parts = !has_weights ? 0 : op->kind == OpKind::linear ? op->num_parts : 1;
    for (int part = 0; part < num_parts; part++) {
      const PackedWeight& weight = *op->parts[part];
      const int tiles = tiles_of(*op).columns[part];
      if (tiles == 0) return nullptr;
      if (index < tiles) return weights_at(weight, column_bound(weight, index, tiles));
      index -= tiles;
    }
  }
  return nullptr;
}

// Returns the sums of some rows and columns, without gaps, in the thread's memory.
float* Products::product(const Op& op, const Rows& rows, const Columns& columns, Scratch& scratch) const {
  const PackedWeight& weight = *op.parts[columns.part];
  const size_t row_bytes = activation_row_bytes(op.input_kind, weight.k);
  float* sums = scratch.tile.get();
  if (columns.size())
    linear_rows(weight, op.input_kind, rows.activations(op.source, columns.first_row, row_bytes), columns.num_rows,
                columns.begin, columns.end, sums, columns.size(), scratch.readahead);
  if (const float* bias = op.vectors[columns.part])
    for (int r = 0; r < columns.num_rows; r++)
      model_.rows.add_scaled(sums + r * columns.size(), bias + columns.begin, 1.0f, columns.size());
  return sums;
}

void Products::write_product(const Op& op, const Rows& rows, const Columns& columns, float* sums) const {
  int first = columns.begin;
  for (int part = 0; part < columns.part; part++) first += op.parts[part]->n;
  for (int i = 0; i < columns.num_rows; i++, sums += columns.size()) {
    const int row = columns.first_row + i;
    if (op.target == LinearTarget::residual)
      model_.rows.add_scaled(rows.residual(row) + first, sums, op.scale, columns.size());
    else
      std::copy_n(sums, columns.size(),
                  first + (op.target == LinearTarget::qkv     ? rows.qkv(row)
                           : op.target == LinearTarget::block ? rows.block(row)
                                                              : ranks_.own_part(row)));
  }
}

float* Products::gated_product(const Op& op, const Rows& rows, const Columns& columns, Scratch& scratch) const {
  const size_t row_bytes = activation_row_bytes(op.input_kind, op.parts[0]->k);
  const uint8_t* x = rows.activations(0, columns.first_row, row_bytes);
  const int begin = columns.begin, size = columns.size();
  float* gate = scratch.tile.get();
  float* up = gate + kTileFloats;
  if (size) {
    const uint8_t* const then = scratch.readahead.next_weights;
    if (then) scratch.readahead.next_weights = weights_at(*op.parts[1], begin);
    linear_rows(*op.parts[0], op.input_kind, x, columns.num_rows, begin, columns.end, gate, size, scratch.readahead);
    scratch.readahead.next_weights = then;
    linear_rows(*op.parts[1], op.input_kind, x, columns.num_rows, begin, columns.end, up, size, scratch.readahead);
  }
  for (int r = 0; r < columns.num_rows; r++) {
    float* row_gate = gate + r * size;
    float* row_up = up + r * size;
    if (op.vectors[0]) model_.rows.add_scaled(row_gate, op.vectors[0] + begin, 1.0f, size);
    if (op.vectors[1]) model_.rows.add_scaled(row_up, op.vectors[1] + begin, 1.0f, size);
    model_.rows.gate(model_.shape.activation, row_gate, row_up, size, row_gate);
  }
  return gate;
}

void Products::write_gated(const Op& op, const Rows& rows, const Columns& columns, float* gate) const {
  const size_t row_bytes = activation_row_bytes(op.activation_kind, model_.shape.intermediate_size);
  uint8_t* out = rows.activations(1, columns.first_row, row_bytes) +
                 activation_offset(op.activation_kind, columns.begin);
  for (int r = 0; r < columns.num_rows; r++, gate += columns.size(), out += row_bytes)
    quantize_rows(op.activation_kind, gate, columns.size(), 1, columns.size(), out);
}

void Products::run_linear(const Op& op, Tile& tile, int num_rows, const Rows& rows, Scratch& scratch) const {
  const Columns columns = columns_of(op, tile, num_rows);
  scratch.readahead.next_weights = weights_after(op, tile);
  float* sums = product(op, rows, columns, scratch);
  scratch.readahead.next_weights = nullptr;
  if (tile.commit()) write_product(op, rows, columns, sums);
}

void Products::run_gated(const Op& op, Tile& tile, int num_rows, const Rows& rows, Scratch& scratch) const {
  const Columns columns = columns_of(op, tile, num_rows);
  scratch.readahead.next_weights = weights_after(op, tile);
  float* gate = gated_product(op, rows, columns, scratch);
  scratch.readahead.next_weights = nullptr;
  if (tile.commit()) write_gated(op, rows, columns, gate);
}

void Products::compute_linear(const Op& op, const Rows& rows, int end_row, Scratch& scratch) const {
  for (int part = 0; part < op.num_parts; part++)
    for_columns(op, part, rows, end_row, [&](const Columns& columns) {
      write_product(op, rows, columns, product(op, rows, columns, scratch));
    });
}

void Products::compute_gated(const Op& op, const Rows& rows, int end_row, Scratch& scratch) const {
  for_columns(op, 0, rows, end_row, [&](const Columns& columns) {
    write_gated(op, rows, columns, gated_product(op, rows, columns, scratch));
  });
}

}  // namespace engine
