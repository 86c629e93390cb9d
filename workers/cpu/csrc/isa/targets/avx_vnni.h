// AVX2 with FMA, F16C and AVX-VNNI.
#include "avx2.h"
#define ENGINE_BASE avx2
#define ENGINE_VNNI
#pragma GCC target("avxvnni")
