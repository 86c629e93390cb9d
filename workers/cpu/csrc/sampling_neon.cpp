// The sampling kernels for NEON with the dot product.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cmath>

#include "rounding.h"
#include "sampling_kernels.h"
#include "target_neon.h"

namespace engine::neon {
#define ENGINE_NEON
#include "vectors.inc"

#include "sampling_kernels.inc"
}  // namespace engine::neon
#endif
