// A step of requests that all decode, laid out from the worker's state and written back to it.
#include <algorithm>
#include <numeric>

#include "program/program.h"

namespace engine {

// A row for the last token of each request, and for each of its drafts.
bool Program::lay_out(const DecodeBatch& batch) {
  decode_starts_.assign(1, 0);
  for (int i = 0; i < batch.num_slots; i++) {
    const int64_t slot = batch.slots[i];
    const int32_t length = batch.num_tokens[slot];
    const int32_t num_drafts =
        batch.num_drafts ? std::min(batch.num_drafts[i], batch.lookup->num_drafts[slot]) : 0;
    if (length < 1 || length + num_drafts >= batch.max_model_len) return false;
    decode_starts_.push_back(decode_starts_.back() + 1 + num_drafts);
  }
  const int rows = decode_starts_.back();
  decode_slots_.resize(rows);
  decode_arrays_.resize(size_t(4 + batch.num_groups) * rows);
  int32_t* input_ids = decode_arrays_.data();
  int32_t* positions = input_ids + rows;
  int32_t* next_positions = positions + rows;
  int32_t* slot_mapping = next_positions + 2 * rows;
  for (int i = 0; i < batch.num_slots; i++) {
    const int64_t slot = batch.slots[i];
    const int32_t start = decode_starts_[i];
    for (int r = start; r < decode_starts_[i + 1]; r++) {
      next_positions[r] = batch.num_tokens[slot] + r - start;
      positions[r] = next_positions[r] - 1;
      input_ids[r] = batch.token_ids[slot * batch.max_model_len + positions[r]];
      if (input_ids[r] < 0 || input_ids[r] >= shape_.vocab_size) return false;
      decode_slots_[r] = slot;
    }
  }
  const int block_size = shape_.block_size;
  decode_groups_.clear();
  for (int g = 0; g < batch.num_groups; g++, slot_mapping += rows) {
    for (int r = 0; r < rows; r++) {
      const int32_t* blocks = batch.block_tables[g] + decode_slots_[r] * batch.block_table_stride;
      slot_mapping[r] =
          blocks[positions[r] / block_size] * block_size + positions[r] % block_size;
    }
    decode_groups_.push_back({batch.block_tables[g], batch.block_table_stride, slot_mapping});
  }
  return true;
}

const SamplingRows* Program::rows_to_sample(const DecodeBatch& batch) {
  if (!batch.sampling) return nullptr;
  decode_sampling_ = *batch.sampling;
  decode_sampling_.slots = decode_slots_.data();
  decode_sampling_.positions = decode_arrays_.data() + 2 * decode_slots_.size();
  return &decode_sampling_;
}

int Program::decode(const DecodeBatch& batch) {
  if (!lay_out(batch)) return -1;
  const int rows = decode_starts_.back();
  const int32_t* input_ids = decode_arrays_.data();
  int32_t* logit_rows = decode_arrays_.data() + 3 * rows;
  std::iota(logit_rows, logit_rows + rows, 0);
  decode_hidden_.reserve(sizeof(float) * rows * shape_.hidden_size);
  Step step{};
  step.num_tokens = step.num_logit_rows = rows;
  step.num_sequences = batch.num_slots;
  step.input_ids = input_ids;
  step.positions = input_ids + rows;
  step.query_start_loc = decode_starts_.data();
  step.table_rows = batch.slots;
  step.groups = decode_groups_.data();
  step.kv_caches = batch.kv_caches;
  step.hidden = decode_hidden_.floats();
  step.logit_rows = logit_rows;
  step.sampling = rows_to_sample(batch);
  step.tokens = batch.chooses_later ? nullptr : batch.tokens;
  run(step);
  return batch.chooses_later ? 0 : advance(batch);
}

int Program::choose(const DecodeBatch& batch) {
  Step step{};
  step.num_logit_rows = decode_starts_.back();
  step.logits = logits_.floats();
  step.sampling = rows_to_sample(batch);
  step.tokens = batch.tokens;
  run(step);
  return advance(batch);
}

// Appends what was sampled, and looks up drafts of what follows.
int Program::advance(const DecodeBatch& batch) {
  const int32_t* input_ids = decode_arrays_.data();
  const int32_t* next_positions = input_ids + 2 * decode_slots_.size();
  // A token counts if it follows what was sampled, not only what was drafted.
  int num_failed = 0, num_kept = 0;
  for (int i = 0; i < batch.num_slots; i++) {
    const int64_t slot = batch.slots[i];
    int32_t* token_ids = batch.token_ids + slot * batch.max_model_len;
    const int32_t end = decode_starts_[i + 1];
    int32_t r = decode_starts_[i];
    bool is_right = true;
    for (; r < end && is_right; r++) {
      const int32_t token = std::max(batch.tokens[r], 0);
      is_right = r + 1 < end && token == input_ids[r + 1];
      num_failed += batch.tokens[r] < 0;
      token_ids[next_positions[r]] = token;
      if (batch.sampling && batch.sampling->logprobs) batch.sampling->logprobs->move(r, num_kept);
      batch.tokens[num_kept++] = batch.tokens[r];
    }
    batch.num_sampled[i] = r - decode_starts_[i];
    batch.num_verified[i] = end - decode_starts_[i] - 1;
    batch.num_tokens[slot] += batch.num_sampled[i];
    batch.num_computed_tokens[slot] = batch.num_tokens[slot] - 1;
  }
  if (batch.lookup)
    look_up_drafts(*batch.lookup, batch.slots, batch.num_slots, batch.max_model_len,
                   batch.token_ids, batch.num_tokens);
  return num_failed;
}

}  // namespace engine
