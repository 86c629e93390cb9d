#pragma once

#include <cstddef>

namespace engine {

// Returns the bytes of the last-level cache that a core can use, or 0 if the system does not say.
ptrdiff_t last_cache_bytes();

}  // namespace engine
