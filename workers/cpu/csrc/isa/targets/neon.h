// NEON with the dot product.
#include <arm_neon.h>
#define ENGINE_NEON
#pragma GCC target("arch=armv8.2-a+dotprod")
