// The functions that Python calls. abi.cpp describes their signatures, and Python declares them accordingly.
#pragma once

#include <cstddef>
#include <cstdint>

#define ENGINE_API extern "C" __attribute__((visibility("default")))

namespace engine {
class Program;
struct DecodeBatch;
struct DraftLookup;
struct ExpertExchange;
struct ModelShape;
struct Op;
struct PackedWeight;
struct Step;
struct Suffixes;
}  // namespace engine

// Returns the description of every struct, enum and function that Python uses.
ENGINE_API const char* engine_abi();

// The functions of each subject are defined in api.cpp in its folder.

ENGINE_API int engine_isa();
ENGINE_API const char* engine_isa_name(int isa);
ENGINE_API int engine_select_isa(int chosen);

ENGINE_API int engine_can_pack(int32_t type, int32_t format);
ENGINE_API size_t engine_packed_bytes(int32_t format, int32_t n, int32_t k, int32_t group);
ENGINE_API int engine_pack_rows(const engine::PackedWeight* w, int32_t type, const uint8_t* source,
                                ptrdiff_t source_row_bytes, int32_t first_row, int32_t rows);
ENGINE_API size_t engine_finish_packing(const engine::PackedWeight* w);
ENGINE_API size_t engine_activation_row_bytes(int32_t kind, int32_t k);
ENGINE_API void engine_quantize_rows(int32_t kind, const float* x, ptrdiff_t x_stride, int32_t rows, int32_t k,
                                     void* out);
ENGINE_API void engine_linear_rows(const engine::PackedWeight* w, int32_t kind, const void* x, int32_t rows,
                                   int32_t n_begin, int32_t n_end, float* out, ptrdiff_t out_stride);
ENGINE_API void engine_unpack_weight_row(const engine::PackedWeight* w, int32_t row, float* out);

ENGINE_API engine::Program* engine_program_new(const engine::ModelShape* shape);
ENGINE_API void engine_program_free(engine::Program* program);
ENGINE_API void engine_program_add(engine::Program* program, const engine::Op* op);
ENGINE_API void engine_program_add_rope(engine::Program* program, const float* inverse_frequencies, int32_t half,
                                        float factor, const int32_t* axes, const float* shifts);
ENGINE_API size_t engine_program_exchange_bytes(const engine::Program* program, int32_t num_ranks);
ENGINE_API void engine_program_join(engine::Program* program, void* memory, int32_t rank, int32_t num_ranks);
ENGINE_API void engine_program_join_experts(engine::Program* program, const engine::ExpertExchange* exchange);
ENGINE_API void engine_program_join_round(engine::Program* program);
ENGINE_API int engine_program_run(engine::Program* program, const engine::Step* step);
ENGINE_API int engine_program_decode(engine::Program* program, const engine::DecodeBatch* batch);
ENGINE_API int engine_program_choose(engine::Program* program, const engine::DecodeBatch* batch);
ENGINE_API void engine_program_profile(const engine::Program* program, double* seconds);

ENGINE_API void engine_look_up_drafts(engine::DraftLookup* lookup, const int64_t* slots, int32_t num_slots,
                                      int64_t max_model_len, int32_t* token_ids, const int32_t* num_tokens);
ENGINE_API void engine_remember_answer(engine::Suffixes* suffixes, const int32_t* tokens, int32_t count);
