// Turns AVX2, FMA and F16C on for the rest of the file. To be included after every other header.
#pragma GCC target("avx2,fma,f16c")
