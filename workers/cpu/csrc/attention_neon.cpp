// The attention kernels for NEON with the dot product.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "attention.h"
#include "rounding.h"
#include "target_neon.h"
// GCC 12 crashes on these kernels with -O3.
#pragma GCC optimize("O2")

namespace engine::neon {
#define ENGINE_NEON
#include "vectors.inc"

#include "attention_formats.inc"
#include "attention_store.inc"
#include "attention_chunks.inc"
#include "attention_kernels.inc"
}  // namespace engine::neon
#endif
