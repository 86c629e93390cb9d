#include "row_kernels.h"

#include "isa.h"

namespace engine {

const RowKernels& row_kernels() {
  switch (isa()) {
#if defined(__x86_64__)
    case Isa::avx512:
    case Isa::avx512_bf16:
    case Isa::amx:
      return avx512::kRowKernels;
    case Isa::avx2:
    case Isa::avx_vnni:
      return avx2::kRowKernels;
#elif defined(__aarch64__)
    case Isa::neon:
      return neon::kRowKernels;
#endif
    default:
      return portable::kRowKernels;
  }
}

}  // namespace engine
