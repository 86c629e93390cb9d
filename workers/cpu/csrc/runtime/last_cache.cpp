#include "runtime/last_cache.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace engine {

namespace {

// Try sysfs first: on AMD's CPUs, sysconf returns the sum over all dies, but a core can use only the cache of its own
// die.
ptrdiff_t find_last_cache_bytes() {
  for (int index = 4; index >= 0; index--) {
    char path[64];
    std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
    std::FILE* file = std::fopen(path, "r");
    if (file == nullptr) continue;
    long kib = 0;
    const int found = std::fscanf(file, "%ldK", &kib);
    std::fclose(file);
    if (found == 1 && kib > 0) return ptrdiff_t(kib) << 10;
  }
#if defined(_SC_LEVEL3_CACHE_SIZE)
  return std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), 0L);
#else
  return 0;
#endif
}

}  // namespace

#if defined(__x86_64__)
const bool kFetchesToSecondLevel = (__builtin_cpu_init(), __builtin_cpu_is("amd"));
#else
const bool kFetchesToSecondLevel = false;
#endif

ptrdiff_t last_cache_bytes() {
  static const ptrdiff_t bytes = find_last_cache_bytes();
  return bytes;
}

}  // namespace engine
