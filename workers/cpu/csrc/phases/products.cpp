#include "phases/products.h"

#include <algorithm>
#include <cmath>

#include "linear/bf16_block.h"
#include "linear/pack.h"
#include "linear/packed_layout.h"

namespace engine {

namespace {

constexpr int kRowBlock = 64;
static_assert(kRowBlock % FirstProducts::kRowsOfRun == 0, "a run is in one block");
// With more rows than this, tiles are smaller, so that all threads finish at about the same time.
constexpr int kManyRows = 16;
constexpr int kTileWeights = 1 << 18;

// Columns are divided into units that are whole groups of activations. Units are larger if there are many columns, and
// for formats whose kernels read several tiles at once.
int unit_columns(const PackedWeight& w, int tiles) {
  return !is_integer(w.format) || w.n >= 16 * kColumnTile * tiles ? 4 * kColumnTile : 2 * kColumnTile;
}
int widest_tile(const PackedWeight& w, int tiles) {
  const int unit = unit_columns(w, tiles);
  const int units = (w.n + unit - 1) / unit;
  return (units + tiles - 1) / tiles * unit;
}

// Calls run(columns) for all columns of a part, as many at a time as have room for their sums in a thread's buffer.
template <class Run>
void for_columns(const Op& op, int part, const Rows& rows, int end_row, Run run) {
  const int num_rows = end_row - rows.first, n = op.parts[part]->n;
  const int width = std::max(kTileFloats / num_rows / 64 * 64, 64);
  for (int begin = 0; begin < n; begin += width)
    run(Columns{rows.first, num_rows, part, begin, std::min(begin + width, n), 0});
}

}  // namespace

int column_tiles(const PackedWeight& w, int at_least, int rows) {
  const int by_size = int(int64_t(w.n) * w.k / kTileWeights), widest = kTileFloats / std::min(rows, kRowBlock);
  int tiles = std::max({at_least, by_size, 1});
  while (widest_tile(w, tiles) > widest) tiles++;
  return tiles;
}

int column_bound(const PackedWeight& w, int tile, int tiles) {
  const int unit = unit_columns(w, tiles);
  const int units = (w.n + unit - 1) / unit;
  return std::min((units / tiles * tile + std::min(units % tiles, tile)) * unit, w.n);
}

const uint8_t* weights_at(const PackedWeight& w, int column) {
  return w.format == WeightFormat::bf16 ? bf16_block(w, column / kBF16BlockColumns)
                                        : w.data + tile_at(w, column / kColumnTile);
}

int Products::begin(const Op& op, int rows, int num_parts) {
  Tiles& tiles = tiles_[model_.index_of(op)];
  tiles.row_blocks = (rows + kRowBlock - 1) / kRowBlock;
  const int tiles_per_thread = rows < kManyRows ? kTilesPerThread : 2 * kTilesPerThread;
  const int wanted = (tiles_per_thread * num_threads_ + tiles.row_blocks - 1) / tiles.row_blocks;
  int64_t columns = 0;
  for (int i = 0; i < num_parts; i++) columns += op.parts[i]->n;
  int total = 0;
  for (int i = 0; i < num_parts; i++) {
    const int share = int((int64_t(op.parts[i]->n) * wanted + columns - 1) / columns);
    total += tiles.columns[i] = engine::column_tiles(*op.parts[i], share, rows);
  }
  return tiles.total = total * tiles.row_blocks;
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

// Threads usually take tiles in turn: those of this product, then those of the products that follow. Products that have
// not begun are assumed to be divided as in the previous step.
const uint8_t* Products::weights_after(const Op& op_of_tile, const Tile& tile) const {
  if (tiles_of(op_of_tile).row_blocks > 1) return nullptr;
  return weights_from(&op_of_tile, tile.index + num_threads_);
}

const uint8_t* Products::weights_from(const Op* op, int index) const {
  for (; op <= &model_.ops.back(); op++) {
    // The next experts are known only when their operation begins.
    if (op->kind == OpKind::route) return nullptr;
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

float* Products::sums(const PackedWeight& weight, const float* bias, ActivationKind kind, const uint8_t* x,
                      int num_rows, int begin, int end, Scratch& scratch, const RowChanges& changes) const {
  const int size = end - begin;
  float* sums = scratch.tile.get();
  if (size) linear_rows(weight, kind, x, num_rows, begin, end, sums, size, scratch.readahead);
  for (int r = 0; bias && r < num_rows; r++) model_.rows.add_scaled(sums + r * size, bias + begin, 1.0f, size);
  add(changes, kind, x, num_rows, 1, begin, end, scratch);
  return sums;
}

void Products::write_product(const Op& op, const Rows& rows, const Columns& columns, float* sums) const {
  int first = op.first_column + columns.begin;
  for (int part = 0; part < columns.part; part++) first += op.parts[part]->n;
  for (int i = 0; i < columns.num_rows; i++, sums += columns.size()) {
    const int row = columns.first_row + i;
    if (op.target == LinearTarget::residual)
      model_.rows.add_scaled(rows.residual(row) + first, sums, op.scale, columns.size());
    else if (op.target == LinearTarget::added)
      model_.rows.add_scaled(rows.qkv(row) + first, sums, 1.0f, columns.size());
    else
      std::copy_n(sums, columns.size(),
                  first + (op.target == LinearTarget::qkv        ? rows.qkv(row)
                           : op.target == LinearTarget::block    ? rows.block(row)
                           : op.target == LinearTarget::shortcut ? rows.shortcut(row)
                           : op.target == LinearTarget::part     ? ranks_.own_part(row)
                                                                 : rows.router_logits(row)));
  }
}

Readahead Products::factors_of(const Op& op, const Tile& tile, const ProductPhase& phase, int end_part,
                               const Columns& columns, Scratch& scratch) const {
  if (!first_products_.adapters()) return {};
  std::vector<Run>& runs = scratch.factors;
  runs.clear();
  const uint8_t* buffer = nullptr;
  ptrdiff_t lines = 0;
  const auto add = [&](const uint8_t* data, size_t bytes) {
    if (!buffer) buffer = data;
    runs.push_back({data - buffer, ptrdiff_t(bytes)});
    lines += ptrdiff_t(bytes / kLineBytes);
  };
  first_products_.for_runs(
      op, columns.first_row, columns.first_row + columns.num_rows, [&](const Adapter& adapter, int, int) {
        for (int part = columns.part; part < end_part; part++) {
          const LowRankFactor& factor = adapter.up[part];
          const size_t block_bytes = low_rank_block_bytes(factor);
          const int begin = columns.begin / kLowRankColumns;
          const int end = (columns.end + kLowRankColumns - 1) / kLowRankColumns;
          if (factor.rank)
            add(static_cast<const uint8_t*>(factor.data) + begin * block_bytes, (end - begin) * block_bytes);
        }
      });
  const Op* next = &op + 1;
  while (next < &model_.ops.back() && next->kind != OpKind::linear && next->kind != OpKind::gated_linear) next++;
  const Tiles& tiles = tiles_of(op);
  if (next->adapters && tiles.row_blocks == 1) {
    // Threads usually take tiles in turn. Each tile of a thread fetches some of the factors.
    const int tiles_of_thread = (tiles.total + num_threads_ - 1) / num_threads_;
    int index = tile.index / num_threads_;
    first_products_.for_share(*next, phase, [&](const Adapter& adapter, int, int) {
      const PackedWeight& down = *adapter.down;
      if (index++ % tiles_of_thread == 0) add(down.data, packed_bytes(down.format, down.n, down.k, down.group));
    });
  }
  if (runs.empty()) return {};
  const int64_t weights = int64_t(columns.size()) * op.parts[columns.part]->k * (end_part - columns.part);
  const int64_t steps = std::max<int64_t>(weights * columns.num_rows / (kReadaheadWeights * kReadaheadRows), 1);
  const int lines_of_step = int(std::min<int64_t>((lines + steps - 1) / steps, Readahead::kMostLines));
  return {{buffer, runs.data(), runs.data() + runs.size()}, {}, lines_of_step};
}

void Products::add_changes(const Op& op, int part, const ProductPhase& phase, const Rows& rows, const Columns& columns,
                           float* sums) {
  const int end_row = columns.first_row + columns.num_rows;
  first_products_.for_runs(op, columns.first_row, end_row, [&](const Adapter& adapter, int first, int count) {
    if (!adapter.up[part].rank) return;
    const float* const x = first_products_.of_run(op, part, phase, rows, adapter, first, count);
    model_.rows.add_low_rank(adapter.up[part], x, first_products_.stride(), count, columns.begin, columns.end,
                             sums + (first - columns.first_row) * columns.size());
  });
}

float* Products::product(const Op& op, const ProductPhase& phase, const Rows& rows, const Columns& columns,
                         Scratch& scratch) {
  const PackedWeight& weight = *op.parts[columns.part];
  const uint8_t* x = rows.activations(op.source, columns.first_row, activation_row_bytes(op.input_kind, weight.k));
  float* out =
      sums(weight, op.vectors[columns.part], op.input_kind, x, columns.num_rows, columns.begin, columns.end, scratch);
  add_changes(op, columns.part, phase, rows, columns, out);
  return out;
}

void Products::add(const RowChanges& changes, ActivationKind kind, const uint8_t* x, int num_rows, int num_parts,
                   int begin, int end, Scratch& scratch) const {
  const int32_t* const adapters = first_products_.adapters();
  if (!changes.adapters || !adapters || begin == end) return;
  for (int row = 0; row < num_rows;) {
    const int number = adapters[changes.rows[row]], first = row++;
    while (row < num_rows && adapters[changes.rows[row]] == number) row++;
    if (number < 0 || !changes.adapters[number].down) continue;
    const Adapter& adapter = changes.adapters[number];
    const PackedWeight& down = *adapter.down;
    scratch.low_rank.reserve(sizeof(float) * (row - first) * down.n);
    float* const low = scratch.low_rank.floats();
    Readahead none;
    linear_rows(down, kind, x + first * activation_row_bytes(kind, down.k), row - first, 0, down.n, low, down.n, none);
    for (int part = 0; part < num_parts; part++) {
      const LowRankFactor& up = adapter.up[part];
      float* const sums = scratch.tile.get() + part * kTileFloats + first * (end - begin);
      if (up.rank) model_.rows.add_low_rank(up, low + part * up.rank, down.n, row - first, begin, end, sums);
    }
  }
}

float* Products::gated_sums(const GatedWeights& weights, ActivationKind kind, const uint8_t* x, int num_rows, int begin,
                            int end, Scratch& scratch, const RowChanges& changes) const {
  multiply_gated(weights, kind, x, num_rows, begin, end, scratch);
  add(changes, kind, x, num_rows, weights.up ? 2 : 1, begin, end, scratch);
  return activate(weights, num_rows, begin, end, scratch);
}

void Products::multiply_gated(const GatedWeights& weights, ActivationKind kind, const uint8_t* x, int num_rows,
                              int begin, int end, Scratch& scratch) const {
  const int size = end - begin;
  float* gate = scratch.tile.get();
  float* up = gate + kTileFloats;
  if (!size) return;
  const uint8_t* const then = scratch.readahead.next_weights;
  if (then && weights.up) scratch.readahead.next_weights = weights_at(*weights.up, begin);
  linear_rows(*weights.gate, kind, x, num_rows, begin, end, gate, size, scratch.readahead);
  scratch.readahead.next_weights = then;
  if (weights.up) linear_rows(*weights.up, kind, x, num_rows, begin, end, up, size, scratch.readahead);
}

float* Products::activate(const GatedWeights& weights, int num_rows, int begin, int end, Scratch& scratch) const {
  const int size = end - begin;
  float* gate = scratch.tile.get();
  float* up = gate + kTileFloats;
  for (int r = 0; r < num_rows; r++) {
    float* row_gate = gate + r * size;
    float* row_up = up + r * size;
    if (weights.gate_bias) model_.rows.add_scaled(row_gate, weights.gate_bias + begin, 1.0f, size);
    if (weights.up_bias) model_.rows.add_scaled(row_up, weights.up_bias + begin, 1.0f, size);
    if (weights.row_factors) {
      model_.rows.scale(row_gate, weights.row_factors[r], size);
      if (weights.up) model_.rows.scale(row_up, weights.row_factors[r], size);
    }
    if (weights.factor != 1.0f) model_.rows.scale(row_gate, weights.factor, size);
    const float limit = weights.limit.bound;
    if (limit) {
      model_.rows.clamp(row_up, -limit, limit, size);
      if (!weights.limit.is_activated) model_.rows.clamp(row_gate, -INFINITY, limit, size);
    }
    if (model_.shape.gate_cap) {
      soft_cap_gate(row_gate, row_up, size);
    } else if (limit && weights.limit.is_activated) {
      model_.rows.gate(model_.shape.activation, row_gate, nullptr, size, row_gate);
      model_.rows.clamp(row_gate, -INFINITY, limit, size);
      model_.rows.multiply(row_gate, row_up, size, row_gate);
    } else if (weights.xielu)
      model_.rows.xielu(*weights.xielu, row_gate, size);
    else
      model_.rows.gate(model_.shape.activation, row_gate, weights.up ? row_up : nullptr, size, row_gate);
  }
  return gate;
}

void Products::soft_cap_gate(float* gate, float* up, int n) const {
  if (model_.shape.up_cap) model_.rows.soft_cap(up, model_.shape.up_cap, n);
  model_.rows.gate(Activation::sigmoid, gate, up, n, up);
  model_.rows.soft_cap(gate, model_.shape.gate_cap, n);
  model_.rows.multiply(gate, up, n, gate);
}

float* Products::gated_product(const Op& op, const ProductPhase& phase, const Rows& rows, const Columns& columns,
                               Scratch& scratch) {
  const GatedWeights weights = {op.parts[0],   op.parts[1],  op.vectors[0],
                                op.vectors[1], op.scale,     reinterpret_cast<const Xielu*>(op.vectors[2]),
                                nullptr,       op.gate_limit};
  const uint8_t* x = rows.activations(0, columns.first_row, activation_row_bytes(op.input_kind, weights.gate->k));
  multiply_gated(weights, op.input_kind, x, columns.num_rows, columns.begin, columns.end, scratch);
  for (int part = 0; part < op.num_parts; part++)
    add_changes(op, part, phase, rows, columns, scratch.tile.get() + part * kTileFloats);
  return activate(weights, columns.num_rows, columns.begin, columns.end, scratch);
}

void Products::write_gated(const Op& op, const Rows& rows, const Columns& columns, float* gate) const {
  const size_t row_bytes = activation_row_bytes(op.activation_kind, op.parts[0]->n);
  uint8_t* out =
      rows.activations(1, columns.first_row, row_bytes) + activation_offset(op.activation_kind, columns.begin);
  for (int r = 0; r < columns.num_rows; r++, gate += columns.size(), out += row_bytes)
    quantize_rows(op.activation_kind, gate, columns.size(), 1, columns.size(), out);
}

Products::Moments Products::moments(const float* gates, int count) const {
  const float sum = model_.rows.sum(gates, count), mean = sum / float(count);
  float squares = 0.0f;
  for (int i = 0; i < count; i++) squares += (gates[i] - mean) * (gates[i] - mean);
  return {sum, squares};
}

void Products::share_gates(const Op& op, const Rows& rows, int row) const {
  const Moments own = moments(rows.qkv(row), op.num_columns);
  float* const part = ranks_.own_part(row);
  part[0] = own.sum;
  part[1] = own.squares;
  part[2] = float(op.num_columns);
}

void Products::sparse_gates(const Op& op, const Rows& rows, int row) const {
  const int count = op.num_columns;
  float* const gates = rows.qkv(row);
  if (op.vectors[0]) exceed_threshold(op, gates, row);
  model_.rows.gate(model_.shape.activation, gates, gates + count, count, gates);
  quantize_rows(op.activation_kind, gates, count, 1, count,
                rows.activations(1, row, activation_row_bytes(op.activation_kind, count)));
}

// The sum of squares about the mean of all gates is the sum of: the squares about each rank's own mean, and, per gate,
// the square of the difference between that mean and the common one (Chan et al., 1979).
void Products::exceed_threshold(const Op& op, float* gates, int row) const {
  const auto& sparse = *reinterpret_cast<const SparseGates*>(op.vectors[0]);
  const int count = op.num_columns;
  Moments all{};
  float mean;
  if (op.target == LinearTarget::part) {
    for (int rank = 0; rank < ranks_.num_ranks(); rank++) all.sum += ranks_.part_of(rank, row)[0];
    mean = all.sum / sparse.count;
    for (int rank = 0; rank < ranks_.num_ranks(); rank++) {
      const float* const part = ranks_.part_of(rank, row);
      const float difference = part[0] / part[2] - mean;
      all.squares += part[1] + part[2] * difference * difference;
    }
  } else {
    all = moments(gates, count);
    mean = all.sum / sparse.count;
  }
  model_.rows.exceed(gates, mean + sparse.deviations * std::sqrt(all.squares / sparse.count), count);
}

void Products::run_linear(const Op& op, Tile& tile, const ProductPhase& phase, const Rows& rows, Scratch& scratch) {
  first_products_.compute_share(op, phase, rows);
  const Columns columns = columns_of(op, tile, phase.num_rows);
  scratch.readahead = factors_of(op, tile, phase, columns.part + 1, columns, scratch);
  scratch.readahead.next_weights = weights_after(op, tile);
  float* sums = product(op, phase, rows, columns, scratch);
  scratch.readahead = {};
  if (tile.commit()) write_product(op, rows, columns, sums);
}

void Products::run_gated(const Op& op, Tile& tile, const ProductPhase& phase, const Rows& rows, Scratch& scratch) {
  first_products_.compute_share(op, phase, rows);
  const Columns columns = columns_of(op, tile, phase.num_rows);
  scratch.readahead = factors_of(op, tile, phase, op.num_parts, columns, scratch);
  scratch.readahead.next_weights = weights_after(op, tile);
  float* gate = gated_product(op, phase, rows, columns, scratch);
  scratch.readahead = {};
  if (tile.commit()) write_gated(op, rows, columns, gate);
}

void Products::compute_linear(const Op& op, const Rows& rows, int end_row, int thread, Scratch& scratch) {
  first_products_.compute_alone(op, rows, end_row, thread);
  for (int part = 0; part < op.num_parts; part++)
    for_columns(op, part, rows, end_row, [&](const Columns& columns) {
      write_product(op, rows, columns, product(op, {thread}, rows, columns, scratch));
    });
}

void Products::compute_gated(const Op& op, const Rows& rows, int end_row, int thread, Scratch& scratch) {
  first_products_.compute_alone(op, rows, end_row, thread);
  for_columns(op, 0, rows, end_row, [&](const Columns& columns) {
    write_gated(op, rows, columns, gated_product(op, {thread}, rows, columns, scratch));
  });
}

}  // namespace engine
