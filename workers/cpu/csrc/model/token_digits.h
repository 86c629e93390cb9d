// Token ids as inputs of layers: digits of base 256, which every dtype of hidden states has exactly.
#pragma once

#include <cstdint>

namespace engine {

constexpr int kTokenDigits = 3;

inline void write_digits(int32_t token, float* digits) {
  for (int i = 0; i < kTokenDigits; i++) digits[i] = float(token >> 8 * i & 255);
}

inline int32_t token_of_digits(const float* digits) {
  int32_t token = 0;
  for (int i = 0; i < kTokenDigits; i++) token |= int32_t(digits[i]) << 8 * i;
  return token;
}

}  // namespace engine
