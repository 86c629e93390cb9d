#include "program/decode.h"

#include <algorithm>
#include <numeric>

namespace engine {

bool DecodeLayout::lay_out(const DecodeBatch& batch) {
  starts_.assign(1, 0);
  for (int i = 0; i < batch.num_slots; i++) {
    const int64_t slot = batch.slots[i];
    const int32_t length = batch.num_tokens[slot];
    const int32_t num_drafts = batch.num_drafts ? std::min(batch.num_drafts[i], batch.lookup->num_drafts[slot]) : 0;
    if (length < 1 || length + num_drafts >= batch.max_model_len) return false;
    starts_.push_back(starts_.back() + 1 + num_drafts);
  }
  const int rows = num_rows();
  slots_.resize(rows);
  arrays_.resize(size_t(kNumArrays + batch.num_groups) * rows);
  int32_t* input_ids = array(kInputIds);
  int32_t* positions = array(kPositions);
  int32_t* next_positions = array(kNextPositions);
  for (int i = 0; i < batch.num_slots; i++) {
    const int64_t slot = batch.slots[i];
    const int32_t start = starts_[i];
    for (int r = start; r < starts_[i + 1]; r++) {
      next_positions[r] = batch.num_tokens[slot] + r - start;
      positions[r] = next_positions[r] - 1;
      input_ids[r] = batch.token_ids[slot * batch.max_model_len + positions[r]];
      if (input_ids[r] < 0 || input_ids[r] >= shape_.vocab_size) return false;
      slots_[r] = slot;
    }
  }
  has_adapters_ = false;
  for (int r = 0; batch.adapters && r < rows; r++) {
    array(kAdapters)[r] = batch.adapters[slots_[r]];
    has_adapters_ |= array(kAdapters)[r] >= 0;
  }
  rotary_.clear();
  const int32_t* offsets = batch.rotary_offsets;
  const auto has_offset = [&](int64_t slot) { return offsets[slot] != 0; };
  if (offsets && std::any_of(slots_.begin(), slots_.end(), has_offset))
    for (int r = 0; r < rows; r++) rotary_.insert(rotary_.end(), 3, positions[r] + offsets[slots_[r]]);
  std::iota(array(kLogitRows), array(kLogitRows) + rows, 0);
  const int block_size = shape_.block_size;
  groups_.clear();
  for (int g = 0; g < batch.num_groups; g++) {
    int32_t* slot_mapping = array(kNumArrays + g);
    for (int r = 0; r < rows; r++) {
      const int32_t* blocks = batch.block_tables[g] + slots_[r] * batch.block_table_strides[g];
      slot_mapping[r] = blocks[positions[r] / block_size] * block_size + positions[r] % block_size;
    }
    groups_.push_back({batch.block_tables[g], batch.block_table_strides[g], slot_mapping});
  }
  return true;
}

const SamplingRows* DecodeLayout::rows_to_sample(const DecodeBatch& batch) {
  if (!batch.sampling) return nullptr;
  sampling_ = *batch.sampling;
  sampling_.slots = slots_.data();
  sampling_.positions = array(kNextPositions);
  return &sampling_;
}

Step DecodeLayout::step(const DecodeBatch& batch) {
  if (!batch.hidden) hidden_.reserve(sizeof(float) * num_rows() * shape_.hidden_size);
  Step step{};
  step.num_tokens = step.num_logit_rows = num_rows();
  step.num_sequences = batch.num_slots;
  step.input_ids = array(kInputIds);
  step.positions = array(kPositions);
  step.query_start_loc = starts_.data();
  step.table_rows = batch.slots;
  step.source_lens = batch.source_lens;
  step.groups = groups_.data();
  step.kv_caches = batch.kv_caches;
  step.hidden = batch.hidden ? batch.hidden : hidden_.floats();
  step.hidden_stride = batch.hidden ? batch.hidden_stride : shape_.hidden_size;
  step.logit_rows = array(kLogitRows);
  step.sampling = rows_to_sample(batch);
  step.adapters = has_adapters_ ? array(kAdapters) : nullptr;
  step.rotary = rotary_.empty() ? nullptr : rotary_.data();
  step.tokens = batch.chooses_later ? nullptr : batch.tokens;
  return step;
}

Step DecodeLayout::choice(const DecodeBatch& batch, float* logits) {
  Step step{};
  step.num_logit_rows = num_rows();
  step.logits = logits;
  step.sampling = rows_to_sample(batch);
  step.tokens = batch.tokens;
  return step;
}

int DecodeLayout::advance(const DecodeBatch& batch) const {
  const int32_t* input_ids = array(kInputIds);
  const int32_t* next_positions = array(kNextPositions);
  int num_failed = 0, num_kept = 0;
  for (int i = 0; i < batch.num_slots; i++) {
    const int64_t slot = batch.slots[i];
    int32_t* token_ids = batch.token_ids + slot * batch.max_model_len;
    const int32_t end = starts_[i + 1];
    int32_t r = starts_[i];
    // A token is accepted if all drafts before it were sampled as well.
    bool is_right = true;
    for (; r < end && is_right; r++) {
      const int32_t token = std::max(batch.tokens[r], 0);
      is_right = r + 1 < end && token == input_ids[r + 1];
      num_failed += batch.tokens[r] < 0;
      token_ids[next_positions[r]] = token;
      if (batch.sampling && batch.sampling->logprobs) batch.sampling->logprobs->move(r, num_kept);
      batch.tokens[num_kept++] = batch.tokens[r];
    }
    batch.num_sampled[i] = r - starts_[i];
    batch.num_verified[i] = end - starts_[i] - 1;
    batch.num_tokens[slot] += batch.num_sampled[i];
    batch.num_computed_tokens[slot] = batch.num_tokens[slot] - 1;
  }
  if (batch.lookup)
    look_up_drafts(*batch.lookup, batch.slots, batch.num_slots, batch.max_model_len, batch.token_ids, batch.num_tokens);
  return num_failed;
}

}  // namespace engine
