// AVX-512 without VNNI, as in the processors before Cascade Lake.
#include <immintrin.h>
#define ENGINE_AVX512
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")
// GCC 12 warns about its own headers, which use undefined vectors intentionally.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
