// Instruction sets. Every kernel exists once per set, compiled from the same source, and the set is
// chosen when the process starts.
//
// A source file for one set is named for it (linear_avx512.cpp) and turns its instructions on by
// including target_<set>.h after every other header, so no file needs compiler flags of its own and
// no inline function of a header is compiled for a CPU that lacks them. All sources are compiled with
// -ffp-contract=off: where a product and a sum are fused is part of the result, so it is written out.
#pragma once

namespace engine {

enum class Isa : int { portable = 0, avx2 = 1, avx_vnni = 2, avx512 = 3, avx512_bf16 = 4, neon = 5, amx = 6 };
constexpr int kNumIsas = 7;

// Where the compiler knows its instructions, and a process can ask the kernel for the tiles.
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define ENGINE_AMX
#endif

// avx2 needs FMA and F16C, avx_vnni AVX-VNNI as well; avx512 needs F, BW, DQ, VL, VNNI and BMI2, avx512_bf16 BF16 as
// well, amx AMX for bf16 beside that; neon needs the dot product.
bool isa_supported(Isa isa);

// The best supported set, unless select_isa chose another.
Isa isa();

// Use another set from now on. Returns false, and changes nothing, if this CPU lacks it. Not to be
// called while kernels run.
bool select_isa(Isa isa);

}  // namespace engine
