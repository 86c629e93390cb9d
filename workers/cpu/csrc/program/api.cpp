#include <algorithm>

#include "api.h"
#include "program/program.h"

using namespace engine;

ENGINE_API Program* engine_program_new(const ModelShape* shape) { return new Program(*shape); }

ENGINE_API void engine_program_free(Program* program) { delete program; }

ENGINE_API void engine_program_add(Program* program, const Op* op) { program->add(*op); }

ENGINE_API void engine_program_add_rope(Program* program, const float* inverse_frequencies, int32_t half, float factor,
                                        const int32_t* axes, const float* shifts) {
  program->add_rope(inverse_frequencies, half, factor, axes, shifts);
}

ENGINE_API size_t engine_program_exchange_bytes(const Program* program, int32_t num_ranks) {
  return program->exchange_bytes(num_ranks);
}

ENGINE_API void engine_program_join(Program* program, void* memory, int32_t rank, int32_t num_ranks) {
  program->join(memory, rank, num_ranks);
}

ENGINE_API void engine_program_join_experts(Program* program, const ExpertExchange* exchange) {
  program->join_experts(*exchange);
}

ENGINE_API void engine_program_join_round(Program* program) { program->join_round(); }

ENGINE_API int engine_program_run(Program* program, const Step* step) { return program->run(*step); }

ENGINE_API int engine_program_decode(Program* program, const DecodeBatch* batch) { return program->decode(*batch); }

ENGINE_API int engine_program_choose(Program* program, const DecodeBatch* batch) { return program->choose(*batch); }

ENGINE_API void engine_program_profile(const Program* program, double* seconds) {
  const std::vector<double> profile = program->profile();
  std::copy(profile.begin(), profile.end(), seconds);
}
