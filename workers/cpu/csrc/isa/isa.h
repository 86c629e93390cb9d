// The instruction set in use and its kernels. It is chosen when the library is loaded.
//
// The kernels of a subject are one source, SUBJECT/kernels.cpp, which is compiled once per instruction set; see
// instruction_sets.inc. No compiler flags turn the instructions on, but a pragma behind the last #include (target.h).
// With flags, the inline functions of headers would be compiled for the set as well, and the linker, which keeps one
// copy of each, could keep one that this processor cannot run. All sources are compiled with -ffp-contract=off: which
// products and sums are fused is part of the result, so the kernels state it themselves.
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
  const AttentionKernels* attention;
  const RowKernels* rows;
  const SamplingKernels* sampling;
};

// Returns whether this processor has the instructions of a set.
bool is_supported(Isa isa);
// Returns the name that the worker logs.
const char* isa_name(Isa isa);

// Return the set in use, which is the best supported one unless select_isa chose another, and its kernels.
Isa isa();
const Kernels& kernels();

// Uses another set from now on. Returns false, and changes nothing, if this processor lacks it. It must not be called
// while kernels run.
bool select_isa(Isa isa);

}  // namespace engine
