#pragma once

#include <cstddef>

namespace engine {

// Returns the size in bytes of the last-level cache that a core can use, or 0 if the system does not report it.
ptrdiff_t last_cache_bytes();

}  // namespace engine
