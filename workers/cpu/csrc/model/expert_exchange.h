// The exchange of rows with the ranks that have other experts, if the ranks of several replicas divide the experts of
// every layer. The caller provides the transport.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine {

// Callbacks. Each is called by one thread at a time, and returns null or 0 if a rank is lost.
struct ExpertExchange {
  int32_t num_ranks;
  // Begins a round, in which rows pass through all layers and every rank takes part. The first round of a step begins
  // before the step.
  int32_t (*begin_round)();
  // Sends rows of `row_bytes`, ordered by receiver. `counts` [num_ranks] says how many each rank gets. Returns the rows
  // that this rank received, ordered by sender; `received` [num_ranks] counts them.
  const uint8_t* (*dispatch)(const uint8_t* rows, int64_t row_bytes, const int64_t* counts, int64_t* received);
  // Sends rows like dispatch. `expected` [num_ranks] says how many rows arrive from each rank.
  const uint8_t* (*collect)(const uint8_t* rows, int64_t row_bytes, const int64_t* counts, const int64_t* expected);
};

}  // namespace engine
