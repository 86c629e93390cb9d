// Measures the peak rates of the cores: bytes read from memory, and operations in registers, per second.
//
//     g++ -O3 -march=native -std=c++17 -pthread roofline.cpp -o roofline && ./roofline THREADS
//
// Prints JSON. Peaks for which the instruction set has no dot product are 0.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr size_t kBufferBytes = size_t(256) << 20;  // size per thread, much larger than the caches
constexpr int kPasses = 6;
constexpr int64_t kRounds = 20'000'000;
constexpr int kChains = 16;  // more than the depth times the width of the units

double seconds_since(Clock::time_point start) { return Seconds(Clock::now() - start).count(); }

// The sum of the threads' rates while all of them work.
double on_all(int threads, const std::function<double()>& rate) {
  std::vector<double> rates(threads);
  std::vector<std::thread> pool;
  for (double& r : rates) pool.emplace_back([&] { r = rate(); });
  for (std::thread& thread : pool) thread.join();
  double sum = 0;
  for (double r : rates) sum += r;
  return sum;
}

double bytes_read() {
  typedef uint64_t Line __attribute__((vector_size(64)));
  const size_t lines = kBufferBytes / sizeof(Line);
  std::unique_ptr<Line[], decltype(&std::free)> data(
      static_cast<Line*>(std::aligned_alloc(2 << 20, kBufferBytes)), &std::free);
  for (size_t i = 0; i < lines; i++) data[i] = Line{i};
  Line sums[8] = {};
  const auto start = Clock::now();
  for (int pass = 0; pass < kPasses; pass++)
    for (size_t i = 0; i < lines; i += 8)
      for (int j = 0; j < 8; j++) {
        __builtin_prefetch(&data[i + j] + 64);
        sums[j] ^= data[i + j];
      }
  for (Line& sum : sums) asm volatile("" : "+m"(sum));
  return kPasses * double(kBufferBytes) / seconds_since(start);
}

#if defined(__AVX512F__)
template <class Vector, class Operation>
double operations(int operations_each, Vector a, Operation operation) {
  Vector sums[kChains] = {};
  const auto start = Clock::now();
  for (int64_t round = 0; round < kRounds; round++) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; i++) {
      sums[i] = operation(sums[i], a);
      asm volatile("" : "+v"(sums[i]));
    }
  }
  return double(kRounds) * kChains * operations_each / seconds_since(start);
}
#endif

double int8_operations() {
#if defined(__AVX512VNNI__)
  return operations(128, _mm512_set1_epi8(1),
                    [](__m512i sum, __m512i a) { return _mm512_dpbusd_epi32(sum, a, a); });
#else
  return 0;
#endif
}

double bf16_operations() {
#if defined(__AVX512BF16__)
  return operations(64, _mm512_setzero_ps(), [](__m512 sum, __m512 a) {
    return _mm512_dpbf16_ps(sum, __m512bh(a), __m512bh(a));
  });
#else
  return 0;
#endif
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  std::printf("{\"threads\": %d, \"read_bytes_s\": %.4g, \"int8_ops_s\": %.4g, \"bf16_ops_s\": %.4g}\n",
              threads, on_all(threads, bytes_read), on_all(threads, int8_operations),
              on_all(threads, bf16_operations));
}
