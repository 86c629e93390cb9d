// The row kernels for NEON.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cmath>

#include "rounding.h"
#include "row_kernels.h"

namespace engine::neon {
#define ENGINE_NEON
#include "vectors.inc"

#include "row_kernels.inc"
}  // namespace engine::neon
#endif
