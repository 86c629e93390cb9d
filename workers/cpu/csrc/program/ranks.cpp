#include "program/ranks.h"

#include "program/step.h"

namespace engine {

// A part has room for the rows of a slice, and for a row of logits at least.
size_t Ranks::part_bytes(int num_ranks) const {
  const size_t floats =
      std::max<size_t>(size_t(kSliceTokens) * model_.shape.hidden_size, most_tokens(num_ranks));
  return (sizeof(float) * floats + 63) / 64 * 64;
}

void Ranks::sum_parts(const Op& op, const Rows& rows, int row) const {
  const int hidden_size = model_.shape.hidden_size;
  float* y = rows.block(row);
  std::copy_n(part_of(0, row), hidden_size, y);
  for (int rank = 1; rank < num_ranks(); rank++) model_.rows.add_scaled(y, part_of(rank, row), 1.0f, hidden_size);
  if (op.vectors[0]) model_.rows.add_scaled(y, op.vectors[0], 1.0f, hidden_size);
  if (op.target == LinearTarget::residual) model_.rows.add_scaled(rows.residual(row), y, op.scale, hidden_size);
}

}  // namespace engine
