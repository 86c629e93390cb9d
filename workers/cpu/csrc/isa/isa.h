// Chooses the instruction set when the library is loaded, and gives access to its kernels.
//
// The kernels of a subject are one source, SUBJECT/kernels.cpp, which is compiled once per instruction set; see
// instruction_sets.inc. The instructions are not enabled by compiler flags, but by a pragma after the last #include
// (target.h). With flags, the inline functions of headers would be compiled for the set as well. The linker, which
// keeps one copy of each, could then keep one that this CPU cannot run. All sources are compiled with
// -ffp-contract=off: which products and sums are fused affects the result, so the kernels state it explicitly.
#pragma once

namespace engine {

struct AttentionKernels;
struct LinearKernels;
struct RowKernels;
struct SamplingKernels;

enum class Isa : int {
#define ENGINE_ISA(set, ...) set,
#include "isa/instruction_sets.inc"
};

#define ENGINE_ISA(...) +1
constexpr int kNumIsas = 0
#include "isa/instruction_sets.inc"
    ;

struct Kernels {
  const LinearKernels* linear;
  const AttentionKernels* attention;  // by KVFormat
  const RowKernels* rows;
  const SamplingKernels* sampling;
};

// Returns whether this processor has the instructions of a set.
bool is_supported(Isa isa);
// Returns the name that the worker logs.
const char* isa_name(Isa isa);

// Return the set in use and its kernels. It is the best supported set, unless select_isa has chosen another.
Isa isa();
const Kernels& kernels();

// Uses another set from now on. Returns false, and changes nothing, if this CPU does not support it. Must not be called
// while kernels run.
bool select_isa(Isa isa);

}  // namespace engine
