#include "api.h"
#include "linear/linear.h"
#include "linear/pack.h"

using namespace engine;

ENGINE_API int engine_can_pack(int32_t type, int32_t format) {
  return format >= 0 && format < kNumWeightFormats && can_pack(SourceType(type), WeightFormat(format));
}

ENGINE_API size_t engine_packed_bytes(int32_t format, int32_t n, int32_t k, int32_t group) {
  return packed_bytes(WeightFormat(format), n, k, group);
}

ENGINE_API int engine_pack_rows(const PackedWeight* w, int32_t type, const uint8_t* source, ptrdiff_t source_row_bytes,
                                int32_t first_row, int32_t rows) {
  return pack_rows(*w, SourceType(type), source, source_row_bytes, first_row, rows);
}

ENGINE_API size_t engine_finish_packing(const PackedWeight* w) { return finish_packing(*w); }

ENGINE_API size_t engine_activation_row_bytes(int32_t kind, int32_t k) {
  return activation_row_bytes(ActivationKind(kind), k);
}

ENGINE_API void engine_quantize_rows(int32_t kind, const float* x, ptrdiff_t x_stride, int32_t rows, int32_t k,
                                     void* out) {
  quantize_rows(ActivationKind(kind), x, x_stride, rows, k, out);
}

ENGINE_API void engine_linear_rows(const PackedWeight* w, int32_t kind, const void* x, int32_t rows, int32_t n_begin,
                                   int32_t n_end, float* out, ptrdiff_t out_stride) {
  Readahead nothing;
  linear_rows(*w, ActivationKind(kind), x, rows, n_begin, n_end, out, out_stride, nothing);
}

ENGINE_API void engine_unpack_weight_row(const PackedWeight* w, int32_t row, float* out) {
  unpack_weight_row(*w, row, out);
}
