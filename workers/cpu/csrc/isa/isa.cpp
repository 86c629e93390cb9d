#include "isa/isa.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention/attention.h"
#include "linear/kernels.h"
#include "rows/kernels.h"
#include "sampling/kernels.h"

namespace engine {
namespace {

// The list uses these definitions to state whether a set is supported.

// A macro, because __builtin_cpu_supports accepts only a literal.
#define has(feature) bool(__builtin_cpu_supports(feature))

// A process must request the tile registers from Linux, because they enlarge the state of every thread by 8 KiB.
[[maybe_unused]] bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

[[maybe_unused]] bool has_dot_product() {
#if defined(__aarch64__) && defined(__linux__)
  return getauxval(AT_HWCAP) & (1ul << 20);  // HWCAP_ASIMDDP
#else
  // All of Apple's 64-bit ARM processors have it.
  return true;
#endif
}

struct InstructionSet {
  const char* name;
  bool (*is_supported)();
  Kernels (*kernels)();
};

// In the order of Isa. `kernels` is a function, because a set's code must not run on a CPU that does not support the
// set.
constexpr InstructionSet kInstructionSets[] = {
#define ENGINE_ISA(set, linear, attention, rows, sampling, name, is_supported)                       \
  {name, [] { return is_supported; },                                                                \
   [] {                                                                                              \
     return Kernels{&linear::linear_kernels(), attention::attention_kernels(), &rows::row_kernels(), \
                    &sampling::sampling_kernels()};                                                  \
   }},
#include "isa/instruction_sets.inc"
};

Isa best_isa() {
  int best = kNumIsas - 1;
  while (!is_supported(Isa(best))) best--;
  return Isa(best);
}

Isa selected = best_isa();
Kernels selected_kernels = kInstructionSets[int(selected)].kernels();

}  // namespace

bool is_supported(Isa isa) { return kInstructionSets[int(isa)].is_supported(); }

const char* isa_name(Isa isa) { return kInstructionSets[int(isa)].name; }

Isa isa() { return selected; }

const Kernels& kernels() { return selected_kernels; }

bool select_isa(Isa isa) {
  if (!is_supported(isa)) return false;
  selected = isa;
  selected_kernels = kInstructionSets[int(isa)].kernels();
  return true;
}

}  // namespace engine
