// Attention over keys and values in bf16 by AMX: sixteen rows times sixteen keys, or sixteen elements of values, at
// once. Other formats, and heads that are no multiple of sixteen, are left to AVX-512.
//
// A tile takes as long for one row as for sixteen. A few rows, one token's heads, are faster without: AVX-512 does for
// them what TDPBF16PS is defined to do, in its order and with its roundings. That is, for the even and the odd elements
// of up to 32, or of sixteen keys, a sum each that begins with zero; the two are added, and then added to what was
// there. Subnormal numbers count as zero.
#include "isa.h"
#if defined(ENGINE_AMX)
#include <immintrin.h>

#include "attention.h"
#include "rounding.h"
#include "tiles.h"
#include "target_avx512_bf16.h"

namespace engine::amx {
#define ENGINE_AVX512
#define ENGINE_BF16
#include "vectors.inc"

#include "attention_formats.inc"
#include "attention_chunks.inc"

namespace {

using Format = BF16Format;

constexpr int kTilePairs = kTileRowBytes / 4, kFewRows = 4;

// Tile registers. The first four hold sums.
constexpr int kQueries = 4, kKeys = 5;
// Of a vector of keys. They also take the last queries, and the keys for these, where half a tile is left.
constexpr int kProbabilities = 6, kValues = 7;

void configure() {
  TileConfig config;
  for (int tile = 0; tile <= kKeys; tile++) config.set(tile, kTileRows, kTileRowBytes);
  config.set(kProbabilities, kTileRows, kTileRowBytes / 2);
  config.set(kValues, kTileRows / 2, kTileRowBytes);
  configure_tiles(config);
}

// What passes from tiles to vectors and back.
struct alignas(64) Block {
  float sums[4][kTileRows][kLanes];
  Probabilities<Format> probabilities[kTileRows];
  Floats factors[kTileRows];
};

ENGINE_VECTOR void fetch_lines(const Lines& lines, int from, int to) {
  for (int line = from; line < to; line++) lines.fetch(line);
}

void zero_sums() {
  for_tiles(4, [](auto tile) { zero_tile<tile>(); });
}
void store_sums(int count, Block& block) {
  for_tiles(count, [&](auto tile) { store_tile<tile>(block.sums[tile], kTileRowBytes); });
}

// Of a block's queries with the keys of a chunk's first num_vectors vectors.
void multiply_keys(const ChunkOf<Format>& chunk, const ChunkFetch* fetch, const KVLayout& layout,
                   const uint32_t* queries, int num_vectors, Block& block) {
  const ptrdiff_t key_stride = pair_stride<Format>(layout), key_bytes = key_stride * ptrdiff_t(sizeof(uint16_t));
  const int pairs = layout.head_dim / Format::kPair, query_bytes = pairs * int(sizeof(uint32_t));
  zero_sums();
  const auto multiply = [&](int first, int end, auto query_tile, auto key_tile) {
    load_tile<query_tile>(queries + first, query_bytes);
    for_tiles(num_vectors, [&](auto g) {
      if (fetch) fetch_lines(fetch->during_scores[g], first, end);
      load_tile<key_tile>(chunk.keys[g] + first * key_stride, key_bytes);
      dot_tiles<g, query_tile, key_tile>();
    });
  };
  int pair = 0;
  for (; pair + kTilePairs <= pairs; pair += kTilePairs)
    multiply(pair, pair + kTilePairs, std::integral_constant<int, kQueries>(), std::integral_constant<int, kKeys>());
  if (pair < pairs)
    multiply(pair, pairs, std::integral_constant<int, kProbabilities>(), std::integral_constant<int, kValues>());
  store_sums(num_vectors, block);
}

// Up to four rows of a block.
template <int kRows, int kVectors>
void weigh_rows(const ChunkOf<Format>& chunk, const KVLayout& layout, const AttentionLayer& layer, const int* seen_from,
                const int* seen_to, Block& block, int row, const AttentionState& state) {
  Floats scores[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
    for (int g = 0; g < kVectors; g++) scores[r][g] = load(block.sums[g][row + r]);
  float units[kRows];
  weigh<Format, kRows, kVectors>(scores, chunk, nullptr, layout, layer, seen_from + row, seen_to + row,
                                 state.maximum + row, state.sum + row * kLanes, block.probabilities + row, units,
                                 block.factors + row);
}

template <int kVectors>
void weigh_block(const ChunkOf<Format>& chunk, const KVLayout& layout, const AttentionLayer& layer,
                 const int* seen_from, const int* seen_to, Block& block, int rows, const AttentionState& state) {
  int row = 0;
  for (; row + 4 <= rows; row += 4)
    weigh_rows<4, kVectors>(chunk, layout, layer, seen_from, seen_to, block, row, state);
  const auto rest = rows - row == 3   ? weigh_rows<3, kVectors>
                    : rows - row == 2 ? weigh_rows<2, kVectors>
                                      : weigh_rows<1, kVectors>;
  if (row < rows) rest(chunk, layout, layer, seen_from, seen_to, block, row, state);
}

// Adds a chunk's values by the probabilities to what a block's rows have.
void add_values(const ChunkOf<Format>& chunk, const ChunkFetch* fetch, int padded_head_dim, int num_vectors, int rows,
                Block& block, float* values) {
  const ptrdiff_t value_bytes = ptrdiff_t(padded_head_dim) * Format::kPair * sizeof(uint16_t);
  const int tiles = padded_head_dim / kLanes;
  for (int first = 0; first < tiles; first += 4) {
    const int count = tiles - first < 4 ? tiles - first : 4;
    zero_sums();
    for (int g = 0; g < num_vectors; g++) {
      load_tile<kProbabilities>(block.probabilities[0][0] + g * (kLanes / Format::kPair), sizeof(Probabilities<Format>));
      for_tiles(count, [&](auto tile) {
        const int vector = first + tile;
        if (fetch) fetch_lines(fetch->after_scores[g], vector * kTileRows / 2, (vector + 1) * kTileRows / 2);
        load_tile<kValues>(chunk.values[g] + vector * Format::kVector, value_bytes);
        dot_tiles<tile, kProbabilities, kValues>();
      });
    }
    store_sums(count, block);
    for (int r = 0; r < rows; r++)
      for (int tile = 0; tile < count; tile++) {
        float* const value = values + r * padded_head_dim + (first + tile) * kLanes;
        store(value, fma(load(value), block.factors[r], load(block.sums[tile][r])));
      }
  }
}

// A vector of pairs in bf16, as floats.
struct Pairs {
  Floats even, odd;
};
ENGINE_VECTOR Pairs load_pairs(const uint16_t* p) {
  const Ints words = load_as<Ints>(p);
  return {(Floats)(words << 16), (Floats)(words & broadcast_int(-65536))};
}

// The sums of some rows as one tile instruction makes them: of even and of odd elements.
template <int kRows>
struct TileSums {
  Floats even[kRows] = {}, odd[kRows] = {};

  ENGINE_VECTOR void add(const Pairs& pairs, const float* factors, int row_floats) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      even[r] = fma(pairs.even, broadcast(factors[r * row_floats]), even[r]);
      odd[r] = fma(pairs.odd, broadcast(factors[r * row_floats + 1]), odd[r]);
    }
  }
  ENGINE_VECTOR void add_to(Floats* totals) const {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) totals[r] = totals[r] + (even[r] + odd[r]);
  }
};

// For a few rows, with the results that the tiles have. `queries` are floats, [kRows][head_dim].
template <int kRows, int kVectors>
void add_chunk(const ChunkOf<Format>& chunk, const ChunkFetch* fetch, const KVLayout& layout,
               const AttentionLayer& layer, const float* queries, const int* seen_from, const int* seen_to,
               const AttentionState& state) {
  const int head_dim = layout.head_dim, padded = layout.padded_head_dim();
  const ptrdiff_t key_stride = pair_stride<Format>(layout), value_stride = ptrdiff_t(padded) * Format::kPair;
  Floats scores[kRows][kVectors];
  for (int g = 0; g < kVectors; g++) {
    Floats totals[kRows] = {};
    for (int d = 0; d < head_dim;) {
      const int end = d + 2 * kTilePairs < head_dim ? d + 2 * kTilePairs : head_dim;
      TileSums<kRows> sums;
      for (; d < end; d += Format::kPair) {
        if (fetch) fetch->during_scores[g].fetch(d / Format::kPair);
        sums.add(load_pairs(chunk.keys[g] + d / Format::kPair * key_stride), queries + d, head_dim);
      }
      sums.add_to(totals);
    }
    for (int r = 0; r < kRows; r++) scores[r][g] = totals[r];
  }
  alignas(64) Probabilities<Format> words[kRows];
  float units[kRows];
  Floats factors[kRows];
  weigh<Format, kRows, kVectors>(scores, chunk, fetch, layout, layer, seen_from, seen_to, state.maximum, state.sum,
                                 words, units, factors);
  alignas(64) float probabilities[kRows][kChunk];
  for (int r = 0; r < kRows; r++)
    for (int key = 0; key < kVectors * kLanes; key++)
      probabilities[r][key] = from_bf16(uint16_t(words[r][0][key / 2] >> key % 2 * 16));
  for (int column = 0; column < padded; column += kLanes) {
    Floats totals[kRows] = {};
    for (int g = 0; g < kVectors; g++) {
      TileSums<kRows> sums;
      const uint16_t* elements = chunk.values[g] + column * Format::kPair;
      for (int key = 0; key < kLanes; key += Format::kPair, elements += value_stride) {
        if (fetch && g >= kVectors / 2) fetch->after_scores[g].fetch((column + key) / Format::kPair);
        sums.add(load_pairs(elements), probabilities[0] + g * kLanes + key, kChunk);
      }
      sums.add_to(totals);
    }
    for (int r = 0; r < kRows; r++) {
      float* const value = state.values + r * padded + column;
      store(value, fma(load(value), factors[r], totals[r]));
    }
  }
}

template <int kRows>
auto add_chunk_of(int num_vectors) {
  return num_vectors == 1   ? add_chunk<kRows, 1>
         : num_vectors == 2 ? add_chunk<kRows, 2>
         : num_vectors == 3 ? add_chunk<kRows, 3>
                            : add_chunk<kRows, 4>;
}

// As TDPBF16PS rounds.
struct WithoutSubnormals {
  static constexpr unsigned kFlushAndIgnore = 0x8040;
  const unsigned before = _mm_getcsr();
  WithoutSubnormals() { _mm_setcsr(before | kFlushAndIgnore); }
  ~WithoutSubnormals() { _mm_setcsr(before); }
};

// Fetches what the vectors that a chunk's rows do not see would have fetched.
ENGINE_VECTOR void fetch_unseen(const ChunkFetch* fetch, int num_vectors, int lines) {
  for (int g = num_vectors; fetch && g < kChunkVectors; g++) fetch_lines(fetch->after_scores[g], 0, lines);
}

AttentionState from_row(const AttentionState& state, int row, int padded_head_dim) {
  return {state.maximum + row, state.sum + row * kLanes, state.values + row * padded_head_dim};
}

void attend_few(const KVLayout& layout, const AttentionLayer& layer, const AttentionTask& task, int partition,
                const AttentionState& state) {
  const WithoutSubnormals mode;
  const int rows = task.num_tokens * task.num_heads, padded = layout.padded_head_dim();
  auto* const queries = static_cast<float*>(__builtin_alloca(size_t(rows) * layout.head_dim * sizeof(float)));
  for (int i = 0; i < rows * layout.head_dim; i++)
    queries[i] = from_bf16(uint16_t(task.queries[i / 2] >> i % 2 * 16));
  clear(state, rows, padded);
  for_chunks<Format, kFewRows>(
      layout, layer, task, partition,
      [&](const ChunkOf<Format>& chunk, const ChunkFetch* fetch, int, int count, int num_vectors, const int* seen_from,
          const int* seen_to) {
        const auto add = count == 1   ? add_chunk_of<1>(num_vectors)
                         : count == 2 ? add_chunk_of<2>(num_vectors)
                         : count == 3 ? add_chunk_of<3>(num_vectors)
                                      : add_chunk_of<4>(num_vectors);
        add(chunk, fetch, layout, layer, queries, seen_from, seen_to, state);
        fetch_unseen(fetch, num_vectors, padded / Format::kPair);
      });
}

void attend_tiles(const KVLayout& layout, const AttentionLayer& layer, const AttentionTask& task, int partition,
                  const AttentionState& state) {
  const WithoutSubnormals mode;
  const int rows = task.num_tokens * task.num_heads, words = query_words<Format>(layout);
  const int padded = layout.padded_head_dim(), whole = rows / kTileRows * kTileRows;
  // Tiles are of sixteen rows: behind the last ones there need not be any.
  auto* const last_queries = static_cast<uint32_t*>(__builtin_alloca(kTileRows * words * sizeof(uint32_t)));
  if (whole < rows) {
    const size_t bytes = size_t(rows - whole) * words * sizeof(uint32_t);
    __builtin_memset(last_queries, 0, kTileRows * words * sizeof(uint32_t));
    __builtin_memcpy(last_queries, task.queries + size_t(whole) * words, bytes);
  }
  clear(state, rows, padded);
  Block block;
  __builtin_memset(block.probabilities, 0, sizeof(block.probabilities));
  for_chunks<Format, kTileRows>(
      layout, layer, task, partition,
      [&](const ChunkOf<Format>& chunk, const ChunkFetch* fetch, int row, int count, int num_vectors,
          const int* seen_from, const int* seen_to) {
        const AttentionState of_block = from_row(state, row, padded);
        multiply_keys(chunk, fetch, layout, row < whole ? task.queries + size_t(row) * words : last_queries,
                      num_vectors, block);
        const auto weigh_all = num_vectors == 1   ? weigh_block<1>
                               : num_vectors == 2 ? weigh_block<2>
                               : num_vectors == 3 ? weigh_block<3>
                                                  : weigh_block<4>;
        weigh_all(chunk, layout, layer, seen_from, seen_to, block, count, of_block);
        add_values(chunk, fetch, padded, num_vectors, count, block, of_block.values);
        fetch_unseen(fetch, num_vectors, padded / Format::kPair);
      });
}

void attend(const KVLayout& layout, const AttentionLayer& layer, const AttentionTask& task, AttentionScratch& scratch,
            const AttentionState& total) {
  const AttentionKernels& others = avx512_bf16::kAttentionKernels;
  if (layout.format != KVFormat::bf16 || layout.head_dim % kLanes)
    return others.attend(layout, layer, task, scratch, total);
  const int rows = task.num_tokens * task.num_heads;
  const bool is_few = rows <= kFewRows;
  const auto attend_partition = is_few ? attend_few : attend_tiles;
  if (!is_few) configure();
  attend_partition(layout, layer, task, task.first_partition, total);
  for (int p = task.first_partition + 1; p <= task.last_partition; p++) {
    attend_partition(layout, layer, task, p, scratch.part);
    others.combine(total, scratch.part, rows, layout.padded_head_dim());
  }
  if (!is_few) release_tiles();
}

}  // namespace

const AttentionKernels& attention_kernels() {
  static const AttentionKernels kernels = [] {
    AttentionKernels kernels = avx512_bf16::kAttentionKernels;
    kernels.attend = attend;
    return kernels;
  }();
  return kernels;
}

}  // namespace engine::amx
#endif
