// The sampling kernels for AVX-512 with BF16.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

#include "rounding.h"
#include "sampling_kernels.h"
#include "target_avx512.h"

namespace engine::avx512 {
#define ENGINE_AVX512
#include "vectors.inc"

#include "sampling_kernels.inc"
}  // namespace engine::avx512
#endif
