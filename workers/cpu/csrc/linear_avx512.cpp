// The linear kernels for AVX-512 with VNNI.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstring>

#include "linear_kernels.h"
#include "rounding.h"
#include "target_avx512.h"

namespace engine::avx512 {
#include "linear_avx512.inc"
}  // namespace engine::avx512
#endif
