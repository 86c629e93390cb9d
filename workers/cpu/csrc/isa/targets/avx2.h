// AVX2 with FMA and F16C.
#include <immintrin.h>
#define ENGINE_AVX2
#pragma GCC target("avx2,fma,f16c")
