#include "isa.h"

#include <initializer_list>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(ENGINE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace engine {

#if defined(ENGINE_AMX)
namespace {

// A process has to ask for the registers of tiles: a thread's state grows by 8 KiB with them.
bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace
#endif

bool isa_supported(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return true;
#if defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::avx_vnni:
      return isa_supported(Isa::avx2) && __builtin_cpu_supports("avxvnni");
    case Isa::avx512:
      return isa_supported(Isa::avx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
             __builtin_cpu_supports("bmi2");
    case Isa::avx512_bf16:
      return isa_supported(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
#if defined(ENGINE_AMX)
    case Isa::amx:
      return isa_supported(Isa::avx512_bf16) && __builtin_cpu_supports("amx-tile") &&
             __builtin_cpu_supports("amx-bf16") && may_use_tiles();
#endif
#elif defined(__aarch64__) && defined(__linux__)
    case Isa::neon:
      return getauxval(AT_HWCAP) & (1ul << 20);  // HWCAP_ASIMDDP
#elif defined(__aarch64__) && defined(__APPLE__)
    case Isa::neon:
      return true;
#endif
    default:
      return false;
  }
}

namespace {

Isa best_isa() {
  for (Isa isa : {Isa::amx, Isa::avx512_bf16, Isa::avx512, Isa::avx_vnni, Isa::avx2, Isa::neon})
    if (isa_supported(isa)) return isa;
  return Isa::portable;
}

Isa selected = best_isa();

}  // namespace

Isa isa() { return selected; }

bool select_isa(Isa isa) {
  if (!isa_supported(isa)) return false;
  selected = isa;
  return true;
}

}  // namespace engine
