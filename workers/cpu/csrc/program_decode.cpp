// A step of requests that all decode, laid out from the worker's state and written back to it.
#include <algorithm>
#include <numeric>

#include "program.h"

namespace engine {

int Program::decode(const DecodeBatch& batch) {
  const int rows = batch.num_slots;
  for (int r = 0; r < rows; r++) {
    const int64_t slot = batch.slots[r];
    const int32_t length = batch.num_tokens[slot];
    if (length < 1 || length >= batch.max_model_len) return -1;
    const int32_t token = batch.token_ids[slot * batch.max_model_len + length - 1];
    if (token < 0 || token >= shape_.vocab_size) return -1;
  }
  decode_arrays_.resize(size_t(4 + batch.num_groups) * rows + 1);
  int32_t* input_ids = decode_arrays_.data();
  int32_t* positions = input_ids + rows;
  int32_t* next_positions = positions + rows;
  int32_t* query_start_loc = next_positions + rows;
  int32_t* slot_mapping = query_start_loc + rows + 1;
  std::iota(query_start_loc, query_start_loc + rows + 1, 0);
  for (int r = 0; r < rows; r++) {
    const int64_t slot = batch.slots[r];
    next_positions[r] = batch.num_tokens[slot];
    positions[r] = next_positions[r] - 1;
    input_ids[r] = batch.token_ids[slot * batch.max_model_len + positions[r]];
  }
  const int block_size = shape_.block_size;
  decode_groups_.clear();
  for (int g = 0; g < batch.num_groups; g++, slot_mapping += rows) {
    for (int r = 0; r < rows; r++) {
      const int32_t* blocks = batch.block_tables[g] + batch.slots[r] * batch.block_table_stride;
      slot_mapping[r] =
          blocks[positions[r] / block_size] * block_size + positions[r] % block_size;
    }
    decode_groups_.push_back({batch.block_tables[g], batch.block_table_stride, slot_mapping});
  }
  decode_hidden_.reserve(sizeof(float) * rows * shape_.hidden_size);
  SamplingRows sampling{};
  Step step{};
  step.num_tokens = step.num_sequences = step.num_logit_rows = rows;
  step.input_ids = input_ids;
  step.positions = positions;
  step.query_start_loc = query_start_loc;
  step.table_rows = batch.slots;
  step.groups = decode_groups_.data();
  step.kv_caches = batch.kv_caches;
  step.hidden = decode_hidden_.floats();
  step.logit_rows = query_start_loc;
  step.tokens = batch.tokens;
  if (batch.sampling) {
    sampling = *batch.sampling;
    sampling.positions = next_positions;
    step.sampling = &sampling;
  }
  run(step);
  int num_failed = 0;
  for (int r = 0; r < rows; r++) {
    const int64_t slot = batch.slots[r];
    batch.token_ids[slot * batch.max_model_len + next_positions[r]] = std::max(batch.tokens[r], 0);
    batch.num_computed_tokens[slot] = next_positions[r];
    batch.num_tokens[slot] = next_positions[r] + 1;
    num_failed += batch.tokens[r] < 0;
  }
  return num_failed;
}

}  // namespace engine
