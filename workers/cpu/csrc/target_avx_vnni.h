// Turns AVX2, FMA, F16C and AVX-VNNI on for the rest of the file. To be included after every other header.
#include "target_avx2.h"
#pragma GCC target("avxvnni")
