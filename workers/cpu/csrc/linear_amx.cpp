// The linear kernels for AMX: products of bf16 weights, for every number of rows, since their roundings are not those
// of AVX-512. All else is as in AVX-512: integer weights have a scale for every group of 32, so their sums would have
// to leave the tiles after half a product, which takes longer than the products.
//
// A sum takes k in steps of 32. Of each the products of even and those of odd k are summed apart, every sum rounded to
// the nearest, then both together, and that is added to what the steps before gave. Subnormal numbers count as zeros.
#include "isa.h"
#if defined(ENGINE_AMX)
#include <immintrin.h>

#include <cstddef>
#include <cstring>
#include <initializer_list>

#include "linear_kernels.h"
#include "tiles.h"
#include "target_avx512_bf16.h"

namespace engine::amx {
namespace {

constexpr int kTileK = kTileRowBytes / 2, kTileSteps = kTileK / 2;
// Both as in avx512_bf16. Weights stay in the second cache while rows pass. To decode them again takes less time than
// to read decoded ones, which are more bytes, from there.
constexpr int kPrefetchBytes = 12288, kCachedWeightBytes = 256 << 10;

using Tile = uint8_t[kTileRows][kTileRowBytes];

// Tile registers. The first four hold sums.
constexpr int kFirstActivations = 4, kSecondActivations = 5, kFirstWeights = 6, kSecondWeights = 7;

void configure(int rows) {
  TileConfig config;
  for (int tile = 0; tile < kFirstWeights; tile++) config.set(tile, rows, kTileRowBytes);
  for (int tile : {kFirstWeights, kSecondWeights}) config.set(tile, kTileRows, kTileRowBytes);
  configure_tiles(config);
}

// The weights of kTiles column tiles after those of others: all four of a block, or two. Behind the last k of each are
// zeros.
template <int kTiles>
class Decoder {
 public:
  static constexpr int kColumns = kTiles * kColumnTile, kParts = kBF16BlockColumns / kColumns;

  // From a multiple of kColumns on.
  Decoder(const PackedWeight& w, int n_begin, int n_end)
      : w_(w), next_(n_begin / kColumns), end_((n_end + kColumns - 1) / kColumns) {}

  // The next kRows rows of tiles, from `row` on; row 0 may be the first of other columns.
  template <int kRows>
  ENGINE_INLINE void decode(Tile (&out)[kTiles], int row) {
    static_assert(kMaskSteps % kRows == 0);
    if (row == 0 && left_ == 0 && !begin()) return;
    if (taken_ % kMaskSteps == 0) is_plain_ = plain_steps(block_, taken_ / kMaskSteps);
    const int count = left_ < kRows ? left_ : kRows;
    const __m512i high_bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block_)));
    const uint8_t* step = step_;
    uint64_t is_plain = is_plain_;
    for (int r = row; r < row + count; r++, is_plain >>= 1) {
      if (kParts == 1 || part_ == 0)
        ENGINE_UNROLL
        for (int i = 0; i < kCodedStepBytes; i += kLineBytes) __builtin_prefetch(step + kPrefetchBytes + i, 0, 3);
      if (__builtin_expect(is_plain & 1, 0)) {
        ENGINE_UNROLL
        for (int t = 0; t < kTiles; t++)
          _mm512_store_si512(out[t][r], _mm512_loadu_si512(step + (part_ * kTiles + t) * kTileStepBytes));
        step += kPlainStepBytes;
      } else {
        decode_step(step, high_bytes, out, r);
        step += kCodedStepBytes;
      }
    }
    for (int r = row + count; r < row + kRows; r++)
      for (Tile& tile : out) _mm512_store_si512(tile[r], _mm512_setzero_si512());
    step_ = step;
    is_plain_ = is_plain;
    taken_ += count;
    left_ -= count;
  }

 private:
  bool begin() {
    if (next_ == end_) return false;
    block_ = bf16_block(w_, next_ / kParts);
    part_ = next_ % kParts;
    next_++;
    step_ = block_ + bf16_steps_at(w_.k);
    taken_ = 0;
    left_ = bf16_steps(w_.k);
    return true;
  }

  ENGINE_INLINE void decode_step(const uint8_t* step, __m512i high_bytes, Tile (&out)[kTiles], int row) const {
    const __m512i codes = _mm512_loadu_si512(step);
    ENGINE_UNROLL
    for (int t = 0; t < kTiles; t += 2) {
      const int half = kParts == 1 ? t / 2 : part_;
      const __m512i low = _mm512_loadu_si512(step + (1 + half) * kTileStepBytes);
      const __m512i of_half = _mm512_and_si512(_mm512_srl_epi16(codes, _mm_cvtsi32_si128(4 * half)),
                                               _mm512_set1_epi8(15));
      const __m512i high = _mm512_shuffle_epi8(high_bytes, of_half);
      _mm512_store_si512(out[t][row], _mm512_unpacklo_epi8(low, high));
      _mm512_store_si512(out[t + 1][row], _mm512_unpackhi_epi8(low, high));
    }
  }

  const PackedWeight& w_;
  int next_, end_, part_ = 0;
  const uint8_t *block_ = nullptr, *step_ = nullptr;
  uint64_t is_plain_ = 0;
  int taken_ = 0, left_ = 0;  // steps of the block
};

// A block of rows of activations as tiles take them: a last tile that is not full from a copy with zeros behind it.
class Activations {
 public:
  void begin(const uint8_t* x, size_t row_bytes, int rows, int k) {
    x_ = x;
    row_bytes_ = row_bytes;
    whole_ = k / kTileK;
    if (k % kTileK == 0) return;
    std::memset(last_, 0, sizeof(last_));
    for (int r = 0; r < rows; r++)
      std::memcpy(last_[r], x + r * row_bytes + size_t(whole_) * kTileRowBytes, size_t(bf16_steps(k % kTileK)) * 4);
  }

  ENGINE_INLINE const uint8_t* tile(int i) const {
    return __builtin_expect(i == whole_, 0) ? last_[0] : x_ + size_t(i) * kTileRowBytes;
  }
  ENGINE_INLINE size_t stride(int i) const { return __builtin_expect(i == whole_, 0) ? kTileRowBytes : row_bytes_; }

 private:
  const uint8_t* x_;
  size_t row_bytes_;
  int whole_;
  alignas(64) Tile last_;
};

// Of the sums of columns from `first` on, those that are asked for. `out` is where column n_begin goes.
template <int kTiles>
ENGINE_INLINE void store(const float (&sums)[kTiles][kTileRows][kColumnTile], int rows, int first, int n_begin,
                         int n_end, float* out, ptrdiff_t out_stride) {
  for (int r = 0; r < rows; r++, out += out_stride)
    ENGINE_UNROLL
    for (int t = 0; t < kTiles; t++) {
      const int n = first + t * kColumnTile, columns = n_end - n;
      if (n < n_begin || columns <= 0) continue;
      const __mmask16 mask = columns < kColumnTile ? __mmask16((1u << columns) - 1) : __mmask16(0xffff);
      _mm512_mask_storeu_ps(out + (n - n_begin), mask, _mm512_load_ps(sums[t][r]));
    }
}

// One block of rows times four column tiles at a time, or two times two: the sums stay in registers. While weights are
// multiplied the next ones are decoded.
template <int kRowBlocks>
__attribute__((noinline)) void multiply(const PackedWeight& w, const uint8_t* x, size_t row_bytes, int rows,
                                        const int (&first_rows)[kRowBlocks], int n_begin, int n_end, float* out,
                                        ptrdiff_t out_stride, Readahead& readahead) {
  constexpr int kTiles = 4 / kRowBlocks, kQuarter = kTileSteps / 4;
  constexpr bool kIsOne = kRowBlocks == 1;
  using OfColumns = Decoder<kTiles>;
  alignas(64) Tile weights[2][kTiles];
  alignas(64) float sums[kRowBlocks][kTiles][kTileRows][kColumnTile];
  Activations activations[kRowBlocks];
  for (int b = 0; b < kRowBlocks; b++) activations[b].begin(x + first_rows[b] * row_bytes, row_bytes, rows, w.k);
  OfColumns decoder(w, n_begin, n_end);
  decoder.template decode<kTileSteps>(weights[0], 0);
  const int tiles_of_k = (w.k + kTileK - 1) / kTileK;
  int turn = 0;
  for (int first = n_begin / OfColumns::kColumns * OfColumns::kColumns; first < n_end; first += OfColumns::kColumns) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    for (int i = 0; i < tiles_of_k; i++, turn ^= 1) {
      const Tile(&now)[kTiles] = weights[turn];
      Tile(&next)[kTiles] = weights[turn ^ 1];
      readahead.step();
      load_tile<kFirstActivations>(activations[0].tile(i), activations[0].stride(i));
      load_tile<kFirstWeights>(now[0], kTileRowBytes);
      dot_tiles<0, kFirstActivations, kFirstWeights>();
      decoder.template decode<kQuarter>(next, 0);
      load_tile<kSecondWeights>(now[1], kTileRowBytes);
      dot_tiles<1, kFirstActivations, kSecondWeights>();
      decoder.template decode<kQuarter>(next, kQuarter);
      readahead.step();
      if constexpr (kIsOne) {
        load_tile<kFirstWeights>(now[2], kTileRowBytes);
        dot_tiles<2, kFirstActivations, kFirstWeights>();
      } else {
        load_tile<kSecondActivations>(activations[1].tile(i), activations[1].stride(i));
        dot_tiles<2, kSecondActivations, kFirstWeights>();
      }
      decoder.template decode<kQuarter>(next, 2 * kQuarter);
      if constexpr (kIsOne) {
        load_tile<kSecondWeights>(now[3], kTileRowBytes);
        dot_tiles<3, kFirstActivations, kSecondWeights>();
      } else {
        dot_tiles<3, kSecondActivations, kSecondWeights>();
      }
      decoder.template decode<kQuarter>(next, 3 * kQuarter);
    }
    store_tile<0>(sums[0][0], kTileRowBytes);
    store_tile<1>(sums[0][1], kTileRowBytes);
    store_tile<2>(sums[kIsOne ? 0 : 1][kIsOne ? 2 : 0], kTileRowBytes);
    store_tile<3>(sums[kIsOne ? 0 : 1][kIsOne ? 3 : 1], kTileRowBytes);
    for (int b = 0; b < kRowBlocks; b++)
      store(sums[b], rows, first, n_begin, n_end, out + first_rows[b] * out_stride, out_stride);
  }
}

void bf16_linear(const PackedWeight& w, ActivationKind kind, const uint8_t* x, int rows, int n_begin, int n_end,
                 float* out, ptrdiff_t out_stride, Readahead& readahead) {
  if (rows == 0) return;
  const size_t row_bytes = activation_row_bytes(kind, w.k);
  const int in_tile = rows < kTileRows ? rows : kTileRows;
  const int row_blocks = (rows + kTileRows - 1) / kTileRows;
  // The last block has rows of the one before as well, so that none has fewer.
  const auto first_row = [&](int block) { return block + 1 < row_blocks ? block * kTileRows : rows - in_tile; };
  const int cached_blocks = kCachedWeightBytes / (bf16_steps(w.k) * kCodedStepBytes) + 1;
  configure(in_tile);
  for (int begin = n_begin, end; begin < n_end; begin = end) {
    end = (begin / kBF16BlockColumns + cached_blocks) * kBF16BlockColumns;
    if (row_blocks <= 2 || end > n_end) end = n_end;
    for (int b = 0; b < row_blocks; b += 2) {
      float* const to = out + (begin - n_begin);
      if (b + 1 < row_blocks)
        multiply<2>(w, x, row_bytes, in_tile, {first_row(b), first_row(b + 1)}, begin, end, to, out_stride, readahead);
      else
        multiply<1>(w, x, row_bytes, in_tile, {first_row(b)}, begin, end, to, out_stride, readahead);
    }
  }
  release_tiles();
}

}  // namespace

const LinearKernels& linear_kernels() {
  static const LinearKernels kernels = [] {
    LinearKernels kernels = avx512_bf16::kLinearKernels;
    kernels.linear[int(WeightFormat::bf16)] = bf16_linear;
    kernels.rows_at_once[int(WeightFormat::bf16)] = 2 * kTileRows;
    return kernels;
  }();
  return kernels;
}

}  // namespace engine::amx
#endif
