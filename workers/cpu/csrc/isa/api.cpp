#include "api.h"
#include "isa/isa.h"

using namespace engine;

ENGINE_API int engine_isa() { return int(isa()); }

ENGINE_API const char* engine_isa_name(int isa) { return isa >= 0 && isa < kNumIsas ? isa_name(Isa(isa)) : nullptr; }

ENGINE_API int engine_select_isa(int chosen) { return chosen >= 0 && chosen < kNumIsas && select_isa(Isa(chosen)); }
