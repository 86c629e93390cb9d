// Turns AVX-512 and BF16 on for the rest of the file. To be included after every other header.
#include "target_avx512.h"
#pragma GCC target("avx512bf16")
