// The attention kernels for AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

#include "attention.h"
#include "rounding.h"
#include "target_avx2.h"

namespace engine::avx2 {
#define ENGINE_AVX2
#include "vectors.inc"

#include "attention_formats.inc"
#include "attention_store.inc"
#include "attention_chunks.inc"
#include "attention_kernels.inc"
}  // namespace engine::avx2
#endif
