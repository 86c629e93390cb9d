// The eight tile registers of AMX, by number. (The compilers' own functions accept only a literal as a number, and do
// not inform the optimizer that they read memory.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace engine::amx {

constexpr int kTileRows = 16, kTileRowBytes = 64;

// The number of rows of each register, and the bytes per row.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int tile_row_bytes) {
    rows[tile] = uint8_t(tile_rows);
    row_bytes[tile] = uint16_t(tile_row_bytes);
  }
};

#define ENGINE_TILE inline __attribute__((always_inline))

// Sets the sizes of all registers and clears them.
ENGINE_TILE void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
// Releases all registers. Interrupting a thread costs less if no tile register is in use.
ENGINE_TILE void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
ENGINE_TILE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// The rows in memory are `stride` bytes apart.
template <int kTile>
ENGINE_TILE void load_tile(const void* p, ptrdiff_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
ENGINE_TILE void store_tile(void* p, ptrdiff_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
// sums[m][n] += rows[m] * columns[n], where the elements are pairs of bf16 (TDPBF16PS).
template <int kSums, int kRows, int kColumns>
ENGINE_TILE void dot_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
}
// sums[m][n] += rows[m] * columns[n], where the elements are four signed bytes (TDPBSSD).
template <int kSums, int kRows, int kColumns>
ENGINE_TILE void dot_signed_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
}

// Calls f with each number below `count`, at most four, as a compile-time constant.
template <class Function>
ENGINE_TILE void for_tiles(int count, Function f) {
  if (count > 0) f(std::integral_constant<int, 0>());
  if (count > 1) f(std::integral_constant<int, 1>());
  if (count > 2) f(std::integral_constant<int, 2>());
  if (count > 3) f(std::integral_constant<int, 3>());
}

}  // namespace engine::amx
