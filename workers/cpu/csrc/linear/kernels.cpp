// The linear kernels of one instruction set: its vector operations, and the products written with them.
#include <cmath>
#include <cstddef>
#include <cstring>
#include <initializer_list>

#include "linear/activation_groups.h"
#include "linear/kernels.h"
#include "runtime/buffer.h"
#include "isa/target.h"

namespace engine::ENGINE_TARGET {
#if defined(ENGINE_TILES)
#include "linear/sets/amx.inc"
#else
#if defined(ENGINE_AVX512)
#include "linear/sets/avx512.inc"
#elif defined(ENGINE_AVX2)
#include "linear/sets/avx2.inc"
#elif defined(ENGINE_NEON)
#include "linear/sets/neon.inc"
#else
#include "linear/sets/portable.inc"
#endif

#include "linear/products.inc"
#endif
}  // namespace engine::ENGINE_TARGET
