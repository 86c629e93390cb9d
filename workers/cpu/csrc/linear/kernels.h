// The functions that every instruction set implements for linear.h.
#pragma once

#include <new>

#include "linear/bf16_block.h"
#include "linear/packed_layout.h"

#define ENGINE_INLINE inline __attribute__((always_inline))
#define ENGINE_UNROLL _Pragma("GCC unroll 16")

namespace engine {

struct LinearKernels {
  // For weights of one format.
  struct OfFormat {
    int rows_at_once;
    // The same as linear_rows.
    void (*linear)(const PackedWeight& w, ActivationKind kind, const uint8_t* x, int rows, int n_begin, int n_end,
                   float* out, ptrdiff_t out_stride, Readahead& readahead);
  };

  size_t pair_bytes;  // the bytes of two activations in bf16: as bf16, or as floats
  // `x` is one row of k floats.
  void (*quantize_int8)(const float* x, int k, void* out);
  void (*quantize_int8_split)(const float* x, int k, void* out);
  void (*quantize_bf16)(const float* x, int k, void* out);
  OfFormat of_format[kNumWeightFormats];  // by WeightFormat
};

#define ENGINE_ISA(set, linear, ...)     \
  namespace linear {                     \
  const LinearKernels& linear_kernels(); \
  }
#include "isa/instruction_sets.inc"

}  // namespace engine
