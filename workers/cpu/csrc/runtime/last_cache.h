#pragma once

#include <cstddef>

namespace engine {

// Returns the size in bytes of the last-level cache that a core can use, or 0 if the system does not report it.
ptrdiff_t last_cache_bytes();

// Whether what is read within microseconds is prefetched to the second-level cache instead of the first, because that
// waits for more lines at a time. It is true for AMD's CPUs, and has not been measured on others.
extern const bool kFetchesToSecondLevel;

}  // namespace engine
