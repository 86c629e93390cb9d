// AMX for bf16, beside AVX-512 with VNNI and BF16. The compiler need not be told of the tile instructions: tiles.h
// writes them in assembly.
#include "isa/tiles.h"
#define ENGINE_TILES
#include "avx512_bf16.h"
