// The linear kernels for AVX2 with FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "linear_kernels.h"
#include "rounding.h"
#include "target_avx2.h"

namespace engine::avx2 {
#include "linear_avx2.inc"
}  // namespace engine::avx2
#endif
