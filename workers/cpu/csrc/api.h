// What Python calls by name.
#pragma once

#define ENGINE_API extern "C" __attribute__((visibility("default")))
