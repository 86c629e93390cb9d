// AVX-512 with VNNI.
#include "avx512.h"
#define ENGINE_BASE avx512
#define ENGINE_VNNI
#pragma GCC target("avx512vnni")
