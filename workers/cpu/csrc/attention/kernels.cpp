// The attention kernels of one instruction set.
#include "attention/attention.h"
#include "runtime/rounding.h"
#include "isa/target.h"

#if defined(ENGINE_NEON)
// GCC 12 crashes on these kernels with -O3, so use -O2.
#pragma GCC optimize("O2")
#endif

namespace engine::ENGINE_TARGET {
#include "isa/vectors.inc"
#include "isa/dots.inc"

#include "attention/formats.inc"
#include "attention/chunks.inc"
#if defined(ENGINE_TILES)
#include "attention/amx.inc"
#else
#include "attention/store.inc"
#include "attention/attend.inc"
#include "attention/index.inc"
#endif
}  // namespace engine::ENGINE_TARGET
