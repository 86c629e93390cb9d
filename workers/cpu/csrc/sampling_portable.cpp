// The sampling kernels in standard C++.
#include <cmath>

#include "rounding.h"
#include "sampling_kernels.h"

namespace engine::portable {
#include "vectors.inc"

#include "sampling_kernels.inc"
}  // namespace engine::portable
