// The sampling kernels of one instruction set.
#include "sampling/kernels.h"

#include <cmath>

#include "runtime/rounding.h"
#include "isa/target.h"

namespace engine::ENGINE_TARGET {
#include "isa/vectors.inc"

namespace {

static_assert(kLogitBlock == 2 * kLanes);

typedef float HalfFloats __attribute__((vector_size(32)));
typedef int64_t Longs __attribute__((vector_size(64)));

ENGINE_VECTOR Floats load_or(const float* x, int i, int n, float missing) {
  return i + kLanes <= n ? load(x + i) : load_part(x + i, n > i ? n - i : 0, missing);
}

// If either operand is NaN, the result is NaN.
ENGINE_VECTOR Floats max_or_nan(Floats a, Floats b) { return select((a > b) | (a != a), a, b); }
ENGINE_VECTOR float maximum_or_nan(Floats x) {
  for (int half = kLanes / 2; half; half /= 2) {
    const Floats upper = upper_lanes(x, half);
    x = max_or_nan(x, upper);
  }
  return x[0];
}

void block_maxima(const float* x, int n, float* maxima) {
  for (int i = 0; i < n; i += kLogitBlock)
    *maxima++ = maximum_or_nan(max_or_nan(load_or(x, i, n, -INFINITY), load_or(x, i + kLanes, n, -INFINITY)));
}

int count_reaching(const float* x, int n, float floor) {
  const Floats floors = broadcast(floor);
  Ints counts{};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) counts -= load(x + i) >= floors;
  int count = 0;
  for (int lane = 0; lane < kLanes; lane++) count += counts[lane];
  for (; i < n; i++) count += x[i] >= floor;
  return count;
}

void levels(const float* x, int n, float peak, float scale, uint16_t* levels) {
  for (int i = 0; i < n; i += kLanes) {
    const Floats below = (broadcast(peak) - load_or(x, i, n, peak)) * broadcast(scale);
    const Floats level = min(below, broadcast(float(kNumLevels - 1)));
    uint16_t whole[kLanes];
    store_narrow(whole, truncated(level));
    __builtin_memcpy(levels + i, whole, 2 * size_t(n - i < kLanes ? n - i : kLanes));
  }
}

struct WeightPair {
  Longs low, high;
};
ENGINE_VECTOR WeightPair weights_of(Floats x, float floor, float peak, float inverse_temperature) {
  const Floats relative = (x - broadcast(peak)) * broadcast(inverse_temperature);
  const Floats scaled = exp2(relative * broadcast(kLog2E)) * broadcast(kWeightScale);
  const Floats kept = select(x >= broadcast(floor), scaled, Floats{});
  float lanes[kLanes];
  HalfFloats halves[2];
  store(lanes, kept);
  __builtin_memcpy(halves, lanes, 64);
  return {__builtin_convertvector(halves[0], Longs), __builtin_convertvector(halves[1], Longs)};
}

void weigh(const float* x, int n, float floor, float peak, float inverse_temperature, int64_t* weights) {
  for (int i = 0; i < n; i += kLanes) {
    const WeightPair pair = weights_of(load_or(x, i, n, -INFINITY), floor, peak, inverse_temperature);
    __builtin_memcpy(weights + i, &pair, sizeof(int64_t) * size_t(n - i < kLanes ? n - i : kLanes));
  }
}

ENGINE_VECTOR int64_t sum(Longs x) {
  int64_t total = 0;
  for (int lane = 0; lane < kLanes / 2; lane++) total += x[lane];
  return total;
}

void block_weights(const float* x, int n, const float* maxima, float floor, float peak, float inverse_temperature,
                   int64_t* sums) {
  for (int i = 0; i < n; i += kLogitBlock, maxima++, sums++) {
    *sums = 0;
    if (*maxima < floor || (*maxima - peak) * inverse_temperature < -kDeepest) continue;
    const WeightPair a = weights_of(load_or(x, i, n, -INFINITY), floor, peak, inverse_temperature);
    const WeightPair b = weights_of(load_or(x, i + kLanes, n, -INFINITY), floor, peak, inverse_temperature);
    *sums = sum((a.low + a.high) + (b.low + b.high));
  }
}

}  // namespace

const SamplingKernels& sampling_kernels() {
  static constexpr SamplingKernels kKernels = {block_maxima, count_reaching, levels, weigh, block_weights};
  return kKernels;
}

}  // namespace engine::ENGINE_TARGET
