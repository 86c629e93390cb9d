// The attention kernels for AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include "attention.h"
#include "rounding.h"
#include "target_avx512.h"

namespace engine::avx512 {
#define ENGINE_AVX512
#include "vectors.inc"

#include "attention_formats.inc"
#include "attention_store.inc"
#include "attention_chunks.inc"
#include "attention_kernels.inc"
}  // namespace engine::avx512
#endif
