// The linear kernels for AVX2 with FMA, F16C and AVX-VNNI.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "linear_kernels.h"
#include "rounding.h"
#include "target_avx_vnni.h"

namespace engine::avx_vnni {
#define ENGINE_VNNI
#include "linear_avx2.inc"
}  // namespace engine::avx_vnni
#endif
