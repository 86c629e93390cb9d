// Turns on the instructions of the set that a source is compiled for, ENGINE_TARGET, for the rest of the file. Include
// it after every other header.
//
// The set's own header defines which vectors its kernels are made of (a target pragma does not define the compiler's
// own macros):
//   ENGINE_AVX512, ENGINE_AVX2, ENGINE_NEON  the registers; none of them for standard C++
//   ENGINE_VNNI                              AVX2 or AVX-512 has dot products of int8 as well
//   ENGINE_BF16                              AVX-512 has dot products of bf16 as well
//   ENGINE_TILES                             there are tile registers
//   ENGINE_BASE                              the set whose kernels are used for formats for which this one has no
//   faster
//                                            instructions; not defined if it has all kernels
#define ENGINE_TARGET_PATH(path) #path
// The path has no spaces.
// clang-format off
#define ENGINE_TARGET_HEADER(set) ENGINE_TARGET_PATH(isa/targets/set.h)
// clang-format on
#include ENGINE_TARGET_HEADER(ENGINE_TARGET)
