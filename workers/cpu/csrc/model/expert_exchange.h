// The exchange of rows with the ranks that have the other experts, where the ranks of several replicas divide the experts
// of every layer. The transport is the caller's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine {

// Every function is called by one thread at a time, and returns null or 0 if a rank is lost.
struct ExpertExchange {
  int32_t num_ranks;
  // Begins a round: the passage of rows through all layers, in which every rank takes part. The first round of a step
  // has begun before the step.
  int32_t (*begin_round)();
  // Sends rows of `row_bytes`, which are ordered by receiver. `counts` [num_ranks] says how many each rank gets. Returns
  // the rows that this rank received, ordered by sender; `received` [num_ranks] counts them.
  const uint8_t* (*dispatch)(const uint8_t* rows, int64_t row_bytes, const int64_t* counts, int64_t* received);
  // Sends rows like dispatch, and receives `expected` [num_ranks] ones.
  const uint8_t* (*collect)(const uint8_t* rows, int64_t row_bytes, const int64_t* counts, const int64_t* expected);
};

}  // namespace engine
