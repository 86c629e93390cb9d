#include "attention/attention.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace engine {

AttentionScratch::AttentionScratch(int max_rows, const KVLayout& layout) {
  const size_t rows = (size_t(max_rows) + 15) / 16 * 16, values = rows * layout.padded_value_dim();
  const size_t state_bytes = (2 * values + 2 * 17 * rows) * sizeof(float);
  const size_t copied_bytes =
      layout.has_values ? 0 : size_t(kChunk) * layout.padded_value_dim() * layout.element_bytes();
  memory_ = static_cast<float*>(std::aligned_alloc(64, (state_bytes + copied_bytes + 63) / 64 * 64));
  copied_values = reinterpret_cast<uint8_t*>(memory_) + state_bytes;
  // Padding is zero and is never written.
  std::memset(copied_values, 0, copied_bytes);
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
