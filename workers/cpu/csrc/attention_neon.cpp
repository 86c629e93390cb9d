// The attention kernels for NEON.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "attention.h"
#include "rounding.h"

namespace engine::neon {
#define ENGINE_NEON
#include "vectors.inc"

#include "attention_formats.inc"
#include "attention_kernels.inc"
}  // namespace engine::neon
#endif
