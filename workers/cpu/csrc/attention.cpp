#include "attention.h"

#include <cstdlib>
#include <initializer_list>

#include "isa.h"

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

const AttentionKernels& attention_kernels() {
  switch (isa()) {
#if defined(__x86_64__)
    case Isa::avx512:
      return avx512::kAttentionKernels;
    case Isa::avx512_bf16:
      return avx512_bf16::kAttentionKernels;
#if defined(ENGINE_AMX)
    case Isa::amx:
      return amx::attention_kernels();
#endif
    case Isa::avx2:
    case Isa::avx_vnni:
      return avx2::kAttentionKernels;
#elif defined(__aarch64__)
    case Isa::neon:
      return neon::kAttentionKernels;
#endif
    default:
      return portable::kAttentionKernels;
  }
}

}  // namespace engine
