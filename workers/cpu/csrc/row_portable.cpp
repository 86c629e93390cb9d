// The row kernels in standard C++.
#include <cmath>

#include "rounding.h"
#include "row_kernels.h"

namespace engine::portable {
#include "vectors.inc"

#include "row_kernels.inc"
}  // namespace engine::portable
