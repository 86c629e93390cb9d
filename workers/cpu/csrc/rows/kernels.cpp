// The row kernels of one instruction set.
#include "rows/kernels.h"

#include <algorithm>
#include <cmath>

#include "runtime/rounding.h"
#include "isa/target.h"

namespace engine::ENGINE_TARGET {
#include "isa/vectors.inc"
#include "isa/dots.inc"

namespace {

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  Floats squares{};
  for_vectors(n, [&](int i, int count) {
    const Floats v = get(x + i, count);
    squares = fma(v, v, squares);
  });
  const Floats factor = broadcast(1.0f / std::sqrt(sum(squares) / float(n) + eps));
  if (weight)
    for_vectors(n, [&](int i, int count) { put(out + i, get(x + i, count) * factor * get(weight + i, count), count); });
  else
    for_vectors(n, [&](int i, int count) { put(out + i, get(x + i, count) * factor, count); });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  Floats total{};
  for_vectors(n, [&](int i, int count) { total = total + get(x + i, count); });
  const float mean = sum(total) / float(n);
  Floats squares{};
  // Fill the lanes past the end with the mean.
  for_vectors(n, [&](int i, int count) {
    const Floats v = count == kLanes ? load(x + i) : load_part(x + i, count, mean);
    const Floats difference = v - broadcast(mean);
    squares = fma(difference, difference, squares);
  });
  const Floats factor = broadcast(1.0f / std::sqrt(sum(squares) / float(n) + eps));
  for_vectors(n, [&](int i, int count) {
    const Floats normed = (get(x + i, count) - broadcast(mean)) * factor * get(weight + i, count);
    put(out + i, bias ? normed + get(bias + i, count) : normed, count);
  });
}

void add_scaled(float* x, const float* y, float factor, int n) {
  for_vectors(
      n, [&](int i, int count) { put(x + i, fma(get(y + i, count), broadcast(factor), get(x + i, count)), count); });
}

void scale(float* x, float factor, int n) {
  for_vectors(n, [&](int i, int count) { put(x + i, get(x + i, count) * broadcast(factor), count); });
}

// Returns 1 + e^-x.
ENGINE_VECTOR Floats one_plus_exp(Floats x) {
  return broadcast(1.0f) + exp2(min(x * broadcast(-kLog2E), broadcast(127.0f)));
}
ENGINE_VECTOR Floats silu(Floats x) { return x / one_plus_exp(x); }
// A NaN is the second operand of max, which returns that operand.
ENGINE_VECTOR Floats relu(Floats x) { return max(broadcast(0.0f), x); }
ENGINE_VECTOR Floats relu2(Floats x) {
  const Floats positive = relu(x);
  return positive * positive;
}
ENGINE_VECTOR Floats gelu_tanh(Floats x) {
  const Floats inner = broadcast(0.7978845608f) * fma(broadcast(0.044715f) * x, x * x, x);
  return broadcast(0.5f) * x * (broadcast(1.0f) + tanh(inner));
}

// The approximation of the error function is 7.1.26 of Abramowitz and Stegun, with an error of 1.5e-7.
ENGINE_VECTOR Floats erf(Floats x) {
  const Floats size = max(x, -x);
  const Floats t = broadcast(1.0f) / fma(broadcast(0.3275911f), size, broadcast(1.0f));
  Floats series = fma(broadcast(1.061405429f), t, broadcast(-1.453152027f));
  series = fma(series, t, broadcast(1.421413741f));
  series = fma(series, t, broadcast(-0.284496736f));
  series = fma(series, t, broadcast(0.254829592f)) * t;
  const Floats rest = series * exp2(x * -x * broadcast(kLog2E));
  const Floats result = broadcast(1.0f) - rest;
  return select(x < Floats{}, -result, result);
}
ENGINE_VECTOR Floats gelu(Floats x) {
  return broadcast(0.5f) * x * (broadcast(1.0f) + erf(x * broadcast(0.70710678f)));
}
// A NaN is the second operand of min and max, which return that operand.
ENGINE_VECTOR Floats relu6(Floats x) { return min(broadcast(6.0f), relu(x)); }
ENGINE_VECTOR Floats clipped_gelu(Floats x) { return max(broadcast(-10.0f), min(broadcast(10.0f), gelu(x))); }
ENGINE_VECTOR Floats laplace(Floats x) {
  return broadcast(0.5f) * (broadcast(1.0f) + erf((x - broadcast(0.707107f)) * broadcast(2.5066308f)));
}

// log(1 + e^x) is the positive part plus log(1 + y) with y = e^-|x|. With s = y / (2 + y), that is 2 * atanh(s), whose
// series ends when s^15, at most 3^-15, no longer matters.
ENGINE_VECTOR Floats softplus(Floats x) {
  const Floats y = exp2(min(-x, x) * broadcast(kLog2E)), s = y / (broadcast(2.0f) + y), square = s * s;
  Floats series = broadcast(1.0f / 13.0f);
  for (const int odd : {11, 9, 7, 5, 3, 1}) series = fma(series, square, broadcast(1.0f / float(odd)));
  return fma(series, s + s, relu(x));
}

// The gated activation of gpt-oss. A NaN is the second operand of min and max, which return that operand.
ENGINE_VECTOR Floats clamped_swiglu(Floats gate, Floats up) {
  const Floats limit = broadcast(7.0f);
  gate = min(limit, gate);
  up = max(broadcast(-7.0f), min(limit, up)) + broadcast(1.0f);
  return up * gate / (broadcast(1.0f) + exp2(min(gate * broadcast(-1.702f * kLog2E), broadcast(127.0f))));
}

template <class Activate>
ENGINE_VECTOR void apply(Activate activate, const float* gate, const float* up, int n, float* out) {
  if (up)
    for_vectors(n, [&](int i, int count) { put(out + i, activate(get(gate + i, count)) * get(up + i, count), count); });
  else
    for_vectors(n, [&](int i, int count) { put(out + i, activate(get(gate + i, count)), count); });
}

void gate(Activation activation, const float* gate, const float* up, int n, float* out) {
  switch (activation) {
    case Activation::silu:
      return apply([](Floats x) { return silu(x); }, gate, up, n, out);
    case Activation::gelu_tanh:
      return apply([](Floats x) { return gelu_tanh(x); }, gate, up, n, out);
    case Activation::clamped_swiglu:
      return for_vectors(
          n, [&](int i, int count) { put(out + i, clamped_swiglu(get(gate + i, count), get(up + i, count)), count); });
    case Activation::relu2:
      return apply([](Floats x) { return relu2(x); }, gate, up, n, out);
    case Activation::sigmoid:
      return apply([](Floats x) { return broadcast(1.0f) / one_plus_exp(x); }, gate, up, n, out);
    case Activation::gelu:
      return apply([](Floats x) { return gelu(x); }, gate, up, n, out);
    case Activation::relu:
      return apply([](Floats x) { return relu(x); }, gate, up, n, out);
    case Activation::softplus:
      return apply([](Floats x) { return softplus(x); }, gate, up, n, out);
    case Activation::quick_gelu:
      return apply([](Floats x) { return x / one_plus_exp(x * broadcast(1.702f)); }, gate, up, n, out);
    case Activation::clipped_gelu:
      return apply([](Floats x) { return clipped_gelu(x); }, gate, up, n, out);
    case Activation::mish:
      return apply([](Floats x) { return x * tanh(softplus(x)); }, gate, up, n, out);
    case Activation::tanh:
      return apply([](Floats x) { return tanh(x); }, gate, up, n, out);
    case Activation::relu6:
      return apply([](Floats x) { return relu6(x); }, gate, up, n, out);
    case Activation::leaky_relu:
      return apply([](Floats x) { return select(x < Floats{}, x * broadcast(0.01f), x); }, gate, up, n, out);
    case Activation::hardswish:
      return apply([](Floats x) { return x * relu6(x + broadcast(3.0f)) * broadcast(1.0f / 6.0f); }, gate, up, n, out);
    case Activation::laplace:
      return apply([](Floats x) { return laplace(x); }, gate, up, n, out);
    case Activation::linear:
      return apply([](Floats x) { return x; }, gate, up, n, out);
  }
}

// A NaN is the second operand of min and max, which return that operand.
void clamp(float* x, float low, float high, int n) {
  for_vectors(
      n, [&](int i, int count) { put(x + i, max(broadcast(low), min(broadcast(high), get(x + i, count))), count); });
}

void xielu(const Xielu& numbers, float* x, int n) {
  for_vectors(n, [&](int i, int count) {
    const Floats v = get(x + i, count);
    const Floats power = exp2(min(broadcast(numbers.most), v) * broadcast(kLog2E)) - broadcast(1.0f);
    const Floats curve =
        select(v > Floats{}, v * v * broadcast(numbers.positive), (power - v) * broadcast(numbers.negative));
    put(x + i, fma(v, broadcast(numbers.linear), curve), count);
  });
}

void rotate(float* heads, int num_heads, int head_dim, const float* cos, const float* sin, int half) {
  for_vectors(half, [&](int i, int count) {
    const Floats c = get(cos + i, count), s = get(sin + i, count);
    for (float* x = heads; x < heads + num_heads * head_dim; x += head_dim) {
      const Floats a = get(x + i, count), b = get(x + half + i, count);
      put(x + i, fma(a, c, -(b * s)), count);
      put(x + half + i, fma(b, c, a * s), count);
    }
  });
}

void soft_cap(float* x, float softcap, int n) {
  const Floats cap = broadcast(softcap), inverse = broadcast(1 / softcap);
  for_vectors(n, [&](int i, int count) {
    const Floats v = get(x + i, count);
    put(x + i, select(v == v, cap * tanh(v * inverse), v), count);
  });
}

bool all_finite(const float* x, int n) {
  Ints differences{};
  for_vectors(n, [&](int i, int count) {
    const Floats v = get(x + i, count);
    differences |= (Ints)(v - v);
  });
  return !lanes_set(differences != Ints{});
}

int argmax(const float* x, int n, float* largest) {
  Floats top = broadcast(x[0]);
  Ints is_nan{};
  for_vectors(n, [&](int i, int count) {
    // Fill the lanes past the end with the first element.
    const Floats v = count == kLanes ? load(x + i) : broadcast(x[0]);
    top = max(top, v);
    is_nan |= v != v;
    for (int j = 0; count < kLanes && j < count; j++) {
      top = max(top, broadcast(x[i + j]));
      is_nan |= broadcast(x[i + j]) != broadcast(x[i + j]);
    }
  });
  if (lanes_set(is_nan)) return -1;
  *largest = maximum(top);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    if (const uint32_t equal = lanes_set(load(x + i) == broadcast(*largest))) return i + __builtin_ctz(equal);
  while (x[i] != *largest) i++;
  return i;
}

void multiply(const float* x, const float* y, int n, float* out) {
  for_vectors(n, [&](int i, int count) { put(out + i, get(x + i, count) * get(y + i, count), count); });
}

float dot(const float* x, const float* y, int n) {
  Floats products{};
  for_vectors(n, [&](int i, int count) { products = fma(get(x + i, count), get(y + i, count), products); });
  return sum(products);
}

float sum(const float* x, int n) {
  Floats total{};
  for_vectors(n, [&](int i, int count) { total = total + get(x + i, count); });
  return sum(total);
}

void exceed(float* x, float threshold, int n) {
  for_vectors(n, [&](int i, int count) { put(x + i, relu(get(x + i, count) - broadcast(threshold)), count); });
}

void convolve(const float* const* inputs, const float* taps, int stride, int kernel, const float* bias, bool activates,
              int n, float* out) {
  for_vectors(n, [&](int i, int count) {
    Floats y = get(inputs[0] + i, count) * get(taps + i, count);
    for (int k = 1; k < kernel; k++) y = fma(get(inputs[k] + i, count), get(taps + k * stride + i, count), y);
    if (bias) y = y + get(bias + i, count);
    put(out + i, activates ? silu(y) : y, count);
  });
}

template <int kRows>
ENGINE_VECTOR void multiply_add_rows(const Factors& factors, const float* matrix, ptrdiff_t matrix_stride, int row,
                                     int columns, float* out, ptrdiff_t out_stride) {
  const float* own = factors.data + row * factors.row_stride;
  for_vectors(columns, [&](int i, int count) {
    Floats sums[kRows];
    for (int r = 0; r < kRows; r++) sums[r] = get(out + (row + r) * out_stride + i, count);
    for (int k = 0; k < factors.columns; k++) {
      const Floats x = get(matrix + k * matrix_stride + i, count);
      for (int r = 0; r < kRows; r++)
        sums[r] = fma(broadcast(own[r * factors.row_stride + k * factors.column_stride]), x, sums[r]);
    }
    for (int r = 0; r < kRows; r++) put(out + (row + r) * out_stride + i, sums[r], count);
  });
}

void multiply_add(const Factors& factors, const float* matrix, ptrdiff_t matrix_stride, int rows, int columns,
                  float* out, ptrdiff_t out_stride) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) multiply_add_rows<4>(factors, matrix, matrix_stride, row, columns, out, out_stride);
  for (; row < rows; row++) multiply_add_rows<1>(factors, matrix, matrix_stride, row, columns, out, out_stride);
}

void scan_channels(const ChannelScan& scan, float* state, float* out) {
  for_vectors(scan.channels, [&](int i, int count) {
    for (int k = 0; k < scan.keys; k++) {
      float* const own = state + ptrdiff_t(k) * scan.channels + i;
      const Floats rate = get(scan.decays + ptrdiff_t(k) * scan.channels + i, count) * broadcast(kLog2E);
      Floats h = get(own, count);
      for (int t = 0; t < scan.tokens; t++) {
        float* const y = out + ptrdiff_t(t) * scan.channels + i;
        const Floats decay = exp2(get(scan.steps + ptrdiff_t(t) * scan.channels + i, count) * rate);
        const ptrdiff_t row = t * scan.stride;
        h = fma(h, decay, get(scan.inputs + row + i, count) * broadcast(scan.b[row + k]));
        put(y, fma(h, broadcast(scan.c[row + k]), get(y, count)), count);
      }
      put(own, h, count);
    }
  });
}

// Returns the columns in a row of words of bf16.
ENGINE_VECTOR void load_pairs(const void* words, Floats& first, Floats& second) {
  const Ints pairs = load_as<Ints>(words);
  first = (Floats)(pairs << 16);
  second = (Floats)(pairs & broadcast_int(int32_t(0xffff0000)));
}

// For each k in order, adds row k of a block times x[k] to the products of kRows rows with `count` columns.
template <FactorFormat kFormat, int kRows>
ENGINE_VECTOR void add_low_rank_block(const uint8_t* block, int rank, const float* x, int x_stride, int count,
                                      float* out, ptrdiff_t out_stride) {
  const int first = std::min(count, kLanes), second = count - first;
  Floats low[kRows], high[kRows];
  for (int r = 0; r < kRows; r++) {
    low[r] = get(out + r * out_stride, first);
    high[r] = second ? get(out + r * out_stride + kLanes, second) : broadcast(0.0f);
  }
  for (int k = 0; k < rank; k++) {
    Floats a, b;
    if constexpr (kFormat == FactorFormat::bf16) {
      load_pairs(block + k * kLanes * sizeof(int32_t), a, b);
    } else {
      const float* row = reinterpret_cast<const float*>(block) + k * kLowRankColumns;
      a = load(row);
      b = load(row + kLanes);
    }
    for (int r = 0; r < kRows; r++) {
      const Floats factor = broadcast(x[r * x_stride + k]);
      low[r] = fma(factor, a, low[r]);
      high[r] = fma(factor, b, high[r]);
    }
  }
  for (int r = 0; r < kRows; r++) {
    put(out + r * out_stride, low[r], first);
    if (second) put(out + r * out_stride + kLanes, high[r], second);
  }
}

template <FactorFormat kFormat>
void add_low_rank_of(const LowRankFactor& factor, const float* x, int x_stride, int rows, int begin, int end,
                     float* out) {
  constexpr int kRows = 2;
  const int size = end - begin, rank = factor.rank;
  const size_t block_bytes = low_rank_block_bytes(factor);
  const uint8_t* block = static_cast<const uint8_t*>(factor.data) + begin / kLowRankColumns * block_bytes;
  for (int column = 0; column < size; column += kLowRankColumns, block += block_bytes) {
    const int count = std::min(kLowRankColumns, size - column);
    int row = 0;
    for (; row + kRows <= rows; row += kRows)
      add_low_rank_block<kFormat, kRows>(block, rank, x + row * x_stride, x_stride, count,
                                         out + ptrdiff_t(row) * size + column, size);
    for (; row < rows; row++)
      add_low_rank_block<kFormat, 1>(block, rank, x + row * x_stride, x_stride, count,
                                     out + ptrdiff_t(row) * size + column, size);
  }
}

// Rounds a row to int16 multiples of its scale, which is returned. A NaN or an infinity makes the scale NaN. The
// products of `rank` numbers with int8 codes must fit in int32.
ENGINE_VECTOR float round_to_int16(const float* x, int rank, int16_t* out) {
  constexpr int kMost = 32767, kMostSum = INT32_MAX / 127;
  constexpr float kSmallest = 0x1p-100f;  // with smaller numbers, the inverse of a scale would overflow
  Ints magnitudes = broadcast_int(0);
  for (int k = 0; k < rank; k += kLanes) {
    const Ints magnitude = (Ints)load(x + k) & broadcast_int(0x7fffffff);
    magnitudes = select(magnitude > magnitudes, magnitude, magnitudes);
  }
  const float largest = from_bits(uint32_t(maximum(magnitudes)));
  const float most = float(std::min(kMost, kMostSum / rank));
  const bool has_scale = largest >= kSmallest && largest < INFINITY;
  const Floats inverse = broadcast(has_scale ? most / largest : 0.0f);
  for (int k = 0; k < rank; k += kLanes)
    store_narrow(out + k, has_scale ? to_nearest(load(x + k) * inverse) : broadcast_int(0));
  return has_scale ? largest / most : largest < kSmallest ? 0.0f : from_bits(kNaNBits);
}

template <int kRows>
ENGINE_VECTOR void add_int8_block(const uint8_t* block, int rank, const int16_t* x, const float* x_scales, int count,
                                  float* out, ptrdiff_t out_stride) {
  const int first = std::min(count, kLanes), second = count - first;
  constexpr int kBytes = kLanes * sizeof(int32_t);
  Ints low[kRows], high[kRows];
  for (int r = 0; r < kRows; r++) low[r] = high[r] = broadcast_int(0);
  Floats scale, other_scale;
  load_pairs(block, scale, other_scale);
  for (int k = 0; k < rank; k += 4) {
    const Ints a = load_as<Ints>(block + (k / 2 + 1) * kBytes), b = load_as<Ints>(block + (k / 2 + 2) * kBytes);
    for (int r = 0; r < kRows; r++) {
      int32_t pairs[2];
      __builtin_memcpy(pairs, x + r * rank + k, sizeof(pairs));
      low[r] = add_dots(low[r], a, pairs[0], pairs[1]);
      high[r] = add_dots(high[r], b, pairs[0], pairs[1]);
    }
  }
  for (int r = 0; r < kRows; r++, out += out_stride) {
    const Floats x_scale = broadcast(x_scales[r]);
    put(out, fma(to_floats(low[r]), scale * x_scale, get(out, first)), first);
    if (second) put(out + kLanes, fma(to_floats(high[r]), other_scale * x_scale, get(out + kLanes, second)), second);
  }
}

void add_int8_low_rank(const LowRankFactor& factor, const float* x, int x_stride, int rows, int begin, int end,
                       float* out) {
  constexpr int kRows = 2, kMostRows = 8;
  const int size = end - begin, rank = factor.rank;
  const size_t block_bytes = low_rank_block_bytes(factor);
  auto* rounded = static_cast<int16_t*>(__builtin_alloca(sizeof(int16_t) * kMostRows * rank));
  float scales[kMostRows];
  for (int first = 0; first < rows; first += kMostRows, x += kMostRows * x_stride, out += kMostRows * size) {
    const int count = std::min(kMostRows, rows - first);
    for (int r = 0; r < count; r++) scales[r] = round_to_int16(x + r * x_stride, rank, rounded + r * rank);
    const uint8_t* block = static_cast<const uint8_t*>(factor.data) + begin / kLowRankColumns * block_bytes;
    for (int column = 0; column < size; column += kLowRankColumns, block += block_bytes) {
      const int columns = std::min(kLowRankColumns, size - column);
      float* const to = out + column;
      int r = 0;
      for (; r + kRows <= count; r += kRows)
        add_int8_block<kRows>(block, rank, rounded + r * rank, scales + r, columns, to + ptrdiff_t(r) * size, size);
      if (r < count)
        add_int8_block<1>(block, rank, rounded + r * rank, scales + r, columns, to + ptrdiff_t(r) * size, size);
    }
  }
}

void add_low_rank(const LowRankFactor& factor, const float* x, int x_stride, int rows, int begin, int end, float* out) {
  const auto add = factor.format == FactorFormat::int8   ? add_int8_low_rank
                   : factor.format == FactorFormat::bf16 ? add_low_rank_of<FactorFormat::bf16>
                                                         : add_low_rank_of<FactorFormat::f32>;
  add(factor, x, x_stride, rows, begin, end, out);
  for (int r = 0; factor.bias && r < rows; r++)
    add_scaled(out + ptrdiff_t(r) * (end - begin), factor.bias + begin, 1.0f, end - begin);
}

}  // namespace

const RowKernels& row_kernels() {
  static constexpr RowKernels kKernels = {rms_norm, layer_norm, add_scaled,   scale,         gate,        clamp, xielu,
                                          rotate,   soft_cap,   all_finite,   argmax,        multiply,    dot,   sum,
                                          exceed,   convolve,   multiply_add, scan_channels, add_low_rank};
  return kKernels;
}

}  // namespace engine::ENGINE_TARGET
