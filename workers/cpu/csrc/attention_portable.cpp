// The attention kernels in standard C++.
#include "attention.h"
#include "rounding.h"

namespace engine::portable {
#include "vectors.inc"

#include "attention_formats.inc"
#include "attention_store.inc"
#include "attention_chunks.inc"
#include "attention_kernels.inc"
}  // namespace engine::portable
