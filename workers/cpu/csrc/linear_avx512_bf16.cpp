// The linear kernels for AVX-512 with VNNI and BF16.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstddef>
#include <cstring>

#include "linear_kernels.h"
#include "rounding.h"
#include "target_avx512_bf16.h"

namespace engine::avx512_bf16 {
#define ENGINE_BF16
#include "linear_avx512.inc"
}  // namespace engine::avx512_bf16
#endif
