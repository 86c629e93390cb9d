// The attention kernels of one instruction set.
#include "attention/attention.h"
#include "runtime/last_cache.h"
#include "runtime/rounding.h"
#include "isa/target.h"

#if defined(ENGINE_NEON)
// GCC 12 crashes on these kernels with -O3, so use -O2.
#pragma GCC optimize("O2")
#endif

namespace engine::ENGINE_TARGET {
#include "isa/vectors.inc"
#include "isa/dots.inc"

#include "attention/formats.inc"
#include "attention/chunks.inc"
#if defined(ENGINE_TILES)
#include "attention/amx.inc"
#else
#include "attention/store.inc"
#include "attention/attend.inc"
#include "attention/index.inc"

namespace {

template <class Format>
constexpr AttentionKernels kernels_of() {
  return {query_words<Format>,
          fetch_first<Format>,
          attend<Format>,
          combine,
          finish,
          convert_queries<Format>,
          store_kv<Format>,
          score_keys<Format>,
          score_groups<Format>,
          load_key<Format>,
          score_blocks<Format>};
}

}  // namespace

const AttentionKernels* attention_kernels() {
  // In the order of KVFormat.
#if defined(ENGINE_BF16)
  static const AttentionKernels* const base = ENGINE_BASE::attention_kernels();
  static const AttentionKernels kernels[] = {kernels_of<BF16Format>(), base[1], base[2], base[3]};
#elif defined(ENGINE_BASE)
  static const AttentionKernels* const base = ENGINE_BASE::attention_kernels();
  static const AttentionKernels kernels[] = {base[0], base[1], base[2], kernels_of<Int8Format>()};
#else
  static constexpr AttentionKernels kernels[] = {kernels_of<BF16Format>(), kernels_of<F16Format>(),
                                                 kernels_of<F32Format>(), kernels_of<Int8Format>()};
#endif
  return kernels;
}
#endif
}  // namespace engine::ENGINE_TARGET
