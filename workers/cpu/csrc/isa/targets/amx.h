// AMX for bf16, in addition to AVX-512 with VNNI and BF16. The tile instructions do not have to be enabled in the
// compiler, because tiles.h writes them in assembly.
#include "isa/tiles.h"
#define ENGINE_TILES
#include "avx512_bf16.h"
#undef ENGINE_BASE
#define ENGINE_BASE avx512_bf16
