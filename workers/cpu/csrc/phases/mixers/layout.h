// Where a recurrent layer's numbers are in a row of the projection, and in a thread's memory.
#pragma once

#include "model/model.h"
#include "runtime/buffer.h"

namespace engine {

inline bool begins_with_gate(const Mixer& m) { return m.kind == MixerKind::mamba2 || m.kind == MixerKind::rg_lru; }
// Returns the place of a scan's outputs in a row of the projection.
inline int outputs_offset(const Mixer& m) {
  if (m.kind == MixerKind::mamba1) return 2 * m.channels;
  return begins_with_gate(m) ? m.num_heads * m.value_dim : 2 * m.num_groups * m.key_dim;
}
// Returns whether products read the convolved inputs, which are in the projection then. A segment has one token.
inline bool is_followed_by_products(const Mixer& m) { return m.kind == MixerKind::mamba1; }
// Returns the place of the vector for steps, B and C of a group in a Mamba-1 layer.
inline int selection_offset(const Mixer& m, int group) {
  return 3 * m.channels + group * (m.step_rank + 2 * m.key_dim);
}
inline int gate_offset(const Mixer& m) { return begins_with_gate(m) ? 0 : m.channels; }
inline int inputs_offset(const Mixer& m) {
  if (m.kind == MixerKind::inner_convolution || m.kind == MixerKind::head_convolution) return 0;
  if (m.kind == MixerKind::ngram_convolution) return m.value_dim;
  return begins_with_gate(m) ? m.num_heads * m.value_dim : m.kind == MixerKind::short_convolution ? 2 * m.channels : 0;
}

// A row's numbers in a thread's memory.
class MixingMemory {
 public:
  MixingMemory(Buffer& buffer, size_t floats) {
    buffer.reserve(floats * sizeof(float));
    next_ = buffer.floats();
  }
  float* take(size_t floats) {
    float* const taken = next_;
    next_ += floats;
    return taken;
  }

 private:
  float* next_;
};

}  // namespace engine
