// AVX-512 with VNNI and BF16.
#include "avx512_vnni.h"
#undef ENGINE_BASE
#define ENGINE_BASE avx512_vnni
#define ENGINE_BF16
#pragma GCC target("avx512bf16")
