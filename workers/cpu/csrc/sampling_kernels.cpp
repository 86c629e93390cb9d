#include "sampling_kernels.h"

#include <cmath>

#include "isa.h"

namespace engine {

const SamplingKernels& sampling_kernels() {
  switch (isa()) {
#if defined(__x86_64__)
    case Isa::avx512:
    case Isa::avx512_bf16:
    case Isa::amx:
      return avx512::kSamplingKernels;
    case Isa::avx2:
    case Isa::avx_vnni:
      return avx2::kSamplingKernels;
#elif defined(__aarch64__)
    case Isa::neon:
      return neon::kSamplingKernels;
#endif
    default:
      return portable::kSamplingKernels;
  }
}

float largest(const float* x, int n) {
  float top = -INFINITY;
  for (int i = 0; i < n; i++) {
    if (std::isnan(x[i])) return x[i];
    top = x[i] > top ? x[i] : top;
  }
  return top;
}

}  // namespace engine
