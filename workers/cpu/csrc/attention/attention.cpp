#include "attention/attention.h"

#include <cstdlib>
#include <initializer_list>

namespace engine {

AttentionScratch::AttentionScratch(int max_rows, int padded_head_dim) {
  const size_t rows = (size_t(max_rows) + 15) / 16 * 16, values = rows * padded_head_dim;
  memory_ = static_cast<float*>(std::aligned_alloc(64, (2 * values + 2 * 17 * rows) * sizeof(float)));
  float* next = memory_;
  for (AttentionState* state : {&part, &total}) {
    state->values = next;
    state->maximum = next + values;
    state->sum = state->maximum + rows;
    next = state->sum + 16 * rows;
  }
}

AttentionScratch::~AttentionScratch() { std::free(memory_); }

}  // namespace engine
