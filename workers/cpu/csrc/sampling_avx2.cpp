// The sampling kernels for AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

#include "rounding.h"
#include "sampling_kernels.h"
#include "target_avx2.h"

namespace engine::avx2 {
#define ENGINE_AVX2
#include "vectors.inc"

#include "sampling_kernels.inc"
}  // namespace engine::avx2
#endif
