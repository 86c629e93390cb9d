#include "model/ranks.h"

#include "model/step.h"

namespace engine {

// A part has room for the rows of a slice, and for at least one row of logits.
size_t Ranks::part_bytes(int num_ranks) const {
  const size_t floats = std::max<size_t>(kSliceTokens * row_size(), most_tokens(num_ranks));
  return (sizeof(float) * floats + 63) / 64 * 64;
}

void Ranks::sum_parts(const Op& op, const Rows& rows, float* inputs, int row) const {
  const int size = op.num_columns;
  float* y = op.target == LinearTarget::residual   ? rows.normed(row)
             : op.target == LinearTarget::block    ? rows.block(row)
             : op.target == LinearTarget::inputs   ? inputs
             : op.target == LinearTarget::shortcut ? rows.shortcut(row)
                                                   : rows.qkv(row) + op.first_column;
  std::copy_n(part_of(0, row), size, y);
  for (int rank = 1; rank < num_ranks(); rank++) model_.rows.add_scaled(y, part_of(rank, row), 1.0f, size);
  if (op.vectors[0]) model_.rows.add_scaled(y, op.vectors[0], 1.0f, size);
  if (op.target == LinearTarget::residual) model_.rows.add_scaled(rows.residual(row), y, op.scale, size);
}

}  // namespace engine
