// What the programs of several ranks, which run the same steps at once, have to tell one another.
#include <algorithm>
#include <cstring>

#include "program/program.h"

namespace engine {

size_t Program::part_bytes(int num_ranks) const {
  // Rows of a slice, and one of logits at least.
  const size_t widest_share = shape_.vocab_size / num_ranks + 1;
  const size_t floats = std::max<size_t>(size_t(kSliceTokens) * shape_.hidden_size, widest_share);
  return (sizeof(float) * floats + 63) / 64 * 64;
}

size_t Program::exchange_bytes(int num_ranks) const {
  return Exchange::memory_bytes(num_ranks, part_bytes(num_ranks));
}

void Program::join(void* memory, int rank, int num_ranks) {
  exchange_ = std::make_unique<Exchange>(memory, rank, num_ranks, part_bytes(num_ranks));
}

void Program::sum_parts(const Op& op, int row) {
  float* y = slice_rows_.block(row);
  std::copy_n(part_of(0, row), shape_.hidden_size, y);
  for (int rank = 1; rank < exchange_->num_ranks(); rank++)
    rows_.add_scaled(y, part_of(rank, row), 1.0f, shape_.hidden_size);
  if (op.vectors[0]) rows_.add_scaled(y, op.vectors[0], 1.0f, shape_.hidden_size);
  if (op.target == LinearTarget::residual)
    rows_.add_scaled(slice_rows_.residual(row), y, op.scale, shape_.hidden_size);
}

// `write(row, bytes)` writes what this rank has of a row; `read(row, rank, bytes)` reads what each rank
// has, in the order of the ranks.
template <class Write, class Read>
void Program::exchange_rows(int rows, size_t row_bytes, Write write, Read read) {
  const int at_once = int(exchange_->part_bytes() / row_bytes);
  for (int first = 0; first < rows; first += at_once) {
    const int end = std::min(first + at_once, rows);
    for (int row = first; row < end; row++)
      write(row, exchange_->own_part() + (row - first) * row_bytes);
    exchange_->meet();
    for (int rank = 0; rank < exchange_->num_ranks(); rank++)
      for (int row = first; row < end; row++)
        read(row, rank, exchange_->part_of(rank) + (row - first) * row_bytes);
  }
}

void Program::gather_logits() {
  const auto share_of = [&](int rank) { return first_token_of(rank + 1) - first_token_of(rank); };
  const int own = share_of(exchange_->rank());
  exchange_rows(
      step_.num_logit_rows, sizeof(float) * (shape_.vocab_size / exchange_->num_ranks() + 1),
      [&](int row, uint8_t* part) {
        std::memcpy(part, own_logits_.floats() + size_t(row) * own, sizeof(float) * own);
      },
      [&](int row, int rank, const uint8_t* part) {
        std::memcpy(step_.logits + size_t(row) * shape_.vocab_size + first_token_of(rank), part,
                    sizeof(float) * share_of(rank));
      });
}

void Program::exchange_winners() {
  exchange_rows(
      step_.num_logit_rows, sizeof(Best),
      [&](int row, uint8_t* part) { std::memcpy(part, &winners_[row], sizeof(Best)); },
      [&](int row, int rank, const uint8_t* part) {
        Best best;
        std::memcpy(&best, part, sizeof(Best));
        winners_[row] = rank ? likelier(winners_[row], best) : best;
      });
}

}  // namespace engine
