#include "phases/attend/latent.h"

#include <algorithm>
#include <cmath>

namespace engine {

namespace {

constexpr int kMostRows = 64;

}  // namespace

int LatentProducts::rows_of_block(const Op& op) const {
  return std::clamp(2 * kTileFloats / op.heads[0].n, 1, kMostRows);
}

int LatentProducts::row_blocks(const Op& op, int rows) const {
  const int most = rows_of_block(op);
  return (rows + most - 1) / most;
}

void LatentProducts::run(const Op& op, Tile& tile, int num_rows, const Rows& rows, Scratch& scratch) const {
  const int blocks = row_blocks(op, num_rows), most = rows_of_block(op), first = tile.index % blocks * most;
  const Block block = {tile.index / blocks, first, std::min(num_rows - first, most)};
  float* sums = product(op, rows, block, scratch);
  if (tile.commit()) write(op, rows, block, sums);
}

void LatentProducts::compute(const Op& op, const Rows& rows, int end_row, Scratch& scratch) const {
  const int most = rows_of_block(op);
  for (int head = 0; head < op.num_heads; head++)
    for (int first = rows.first; first < end_row; first += most) {
      const Block block = {head, first, std::min(end_row - first, most)};
      write(op, rows, block, product(op, rows, block, scratch));
    }
}

float* LatentProducts::product(const Op& op, const Rows& rows, const Block& block, Scratch& scratch) const {
  const LatentShape& latent = *op.latent;
  const PackedWeight& weight = op.heads[block.head];
  const float* x;
  size_t stride;
  if (op.kind == OpKind::latent_queries) {
    x = rows.qkv(block.first_row) + latent.query_offset() + block.head * latent.query_dim();
    stride = rows.qkv_stride();
  } else {
    const size_t row_bytes = activation_row_bytes(ActivationKind::f32, op.num_heads * weight.k);
    x = reinterpret_cast<const float*>(rows.activations(1, block.first_row, row_bytes)) + block.head * weight.k;
    stride = row_bytes / sizeof(float);
  }
  scratch.results.reserve(block.num_rows * activation_row_bytes(op.input_kind, weight.k));
  quantize_rows(op.input_kind, x, ptrdiff_t(stride), block.num_rows, weight.k, scratch.results.bytes());
  float* sums = scratch.tile.get();
  linear_rows(weight, op.input_kind, scratch.results.bytes(), block.num_rows, 0, weight.n, sums, weight.n,
              scratch.readahead);
  return sums;
}

void LatentProducts::write(const Op& op, const Rows& rows, const Block& block, float* sums) const {
  const LatentShape* const latent = op.latent;
  const int size = op.heads[block.head].n;
  const size_t row_bytes = activation_row_bytes(op.activation_kind, op.num_heads * size);
  for (int row = block.first_row; row < block.first_row + block.num_rows; row++, sums += size) {
    if (op.kind == OpKind::latent_queries)
      std::copy_n(sums, size, rows.qkv(row) + latent->product_offset() + block.head * latent->key_dim);
    else {
      const int num_gates = latent ? latent->gate_dim : 0;
      const float* gates = num_gates ? rows.qkv(row) + latent->gate_offset() + block.head * num_gates : nullptr;
      if (num_gates == 1)
        model_.rows.scale(sums, 1.0f / (1.0f + std::exp(-gates[0])), size);
      else if (num_gates)
        model_.rows.gate(model_.shape.output_gate, gates, sums, size, sums);
      quantize_rows(op.activation_kind, sums, size, 1, size,
                    rows.activations(0, row, row_bytes) + activation_offset(op.activation_kind, block.head * size));
    }
  }
}

}  // namespace engine
