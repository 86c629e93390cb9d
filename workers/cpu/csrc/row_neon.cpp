// The row kernels for NEON with the dot product.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cmath>

#include "rounding.h"
#include "row_kernels.h"
#include "target_neon.h"

namespace engine::neon {
#define ENGINE_NEON
#include "vectors.inc"

#include "row_kernels.inc"
}  // namespace engine::neon
#endif
