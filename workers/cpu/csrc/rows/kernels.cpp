// The row kernels of one instruction set.
#include "rows/kernels.h"

#include <cmath>

#include "runtime/rounding.h"
#include "isa/target.h"

namespace engine::ENGINE_TARGET {
#include "isa/vectors.inc"

namespace {

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  Floats squares{};
  for_vectors(n, [&](int i, int count) {
    const Floats v = get(x + i, count);
    squares = fma(v, v, squares);
  });
  const Floats factor = broadcast(1.0f / std::sqrt(sum(squares) / float(n) + eps));
  for_vectors(n, [&](int i, int count) {
    put(out + i, get(x + i, count) * factor * get(weight + i, count), count);
  });
}

void add_scaled(float* x, const float* y, float factor, int n) {
  for_vectors(n, [&](int i, int count) {
    put(x + i, fma(get(y + i, count), broadcast(factor), get(x + i, count)), count);
  });
}

void scale(float* x, float factor, int n) {
  for_vectors(n, [&](int i, int count) {
    put(x + i, get(x + i, count) * broadcast(factor), count);
  });
}

ENGINE_VECTOR Floats silu(Floats x) {
  return x / (broadcast(1.0f) + exp2(min(x * broadcast(-kLog2E), broadcast(127.0f))));
}
ENGINE_VECTOR Floats gelu_tanh(Floats x) {
  const Floats inner = broadcast(0.7978845608f) * fma(broadcast(0.044715f) * x, x * x, x);
  return broadcast(0.5f) * x * (broadcast(1.0f) + tanh(inner));
}

void gate(Activation activation, const float* gate, const float* up, int n, float* out) {
  if (activation == Activation::silu)
    for_vectors(n, [&](int i, int count) {
      put(out + i, silu(get(gate + i, count)) * get(up + i, count), count);
    });
  else
    for_vectors(n, [&](int i, int count) {
      put(out + i, gelu_tanh(get(gate + i, count)) * get(up + i, count), count);
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
    // Lanes past the end are set to the first element.
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

}  // namespace

const RowKernels& row_kernels() {
  static constexpr RowKernels kKernels = {rms_norm, add_scaled, scale, gate, rotate, soft_cap, all_finite, argmax};
  return kKernels;
}

}  // namespace engine::ENGINE_TARGET
