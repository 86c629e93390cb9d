// The data that the programs of several ranks, which run the same steps at the same time, exchange.
#pragma once

#include <algorithm>
#include <memory>

#include "model/model.h"
#include "model/rows.h"
#include "runtime/exchange.h"

namespace engine {

class Ranks {
 public:
  explicit Ranks(const Model& model) : model_(model) {}

  // Returns the bytes of the memory that `num_ranks` programs share.
  size_t memory_bytes(int num_ranks) const { return Exchange::memory_bytes(num_ranks, part_bytes(num_ranks)); }
  // The memory must outlive this object.
  void join(void* memory, int rank, int num_ranks) {
    exchange_ = std::make_unique<Exchange>(memory, rank, num_ranks, part_bytes(num_ranks));
  }

  // Returns whether there are other ranks. All functions below require that.
  bool are_several() const { return exchange_ != nullptr; }
  int rank() const { return exchange_->rank(); }
  int num_ranks() const { return exchange_->num_ranks(); }
  void meet() { exchange_->meet(); }

  // The part of a row's sum that this rank writes before a meeting, and the parts that each rank has written.
  float* own_part(int row) const { return reinterpret_cast<float*>(exchange_->own_part()) + size_t(row) * row_size(); }
  const float* part_of(int rank, int row) const {
    return reinterpret_cast<const float*>(exchange_->part_of(rank)) + size_t(row) * row_size();
  }
  // Adds the parts of a row, in the order of the ranks, and writes the sum to the operation's target, or to `inputs` if
  // that is the target.
  void sum_parts(const Op& op, const Rows& rows, float* inputs, int row) const;

  // Returns the tokens in a rank's part of the vocabulary.
  int first_token_of(int rank) const { return int(int64_t(model_.shape.vocab_size) * rank / num_ranks()); }
  int num_tokens_of(int rank) const { return first_token_of(rank + 1) - first_token_of(rank); }
  int most_tokens() const { return most_tokens(num_ranks()); }

  // Exchanges rows of any size, as many at a time as fit. `write(row, bytes)` writes this rank's data of a row;
  // `read(row, rank, bytes)` reads each rank's data of it, in the order of the ranks.
  template <class Write, class Read>
  void exchange_rows(int rows, size_t row_bytes, Write write, Read read) {
    const int at_once = int(exchange_->part_bytes() / row_bytes);
    for (int first = 0; first < rows; first += at_once) {
      const int end = std::min(first + at_once, rows);
      for (int row = first; row < end; row++) write(row, exchange_->own_part() + (row - first) * row_bytes);
      exchange_->meet();
      for (int rank = 0; rank < exchange_->num_ranks(); rank++)
        for (int row = first; row < end; row++) read(row, rank, exchange_->part_of(rank) + (row - first) * row_bytes);
    }
  }

 private:
  int most_tokens(int num_ranks) const { return model_.shape.vocab_size / num_ranks + 1; }
  size_t row_size() const { return std::max(model_.shape.hidden_size, model_.shape.input_size); }
  size_t part_bytes(int num_ranks) const;

  const Model& model_;
  std::unique_ptr<Exchange> exchange_;
};

}  // namespace engine
