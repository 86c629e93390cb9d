// Rotary position embeddings: the sines and cosines for the tokens of a slice.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace engine {

class RotaryTables {
 public:
  // The sines and cosines for one row, `half` of each.
  struct Angles {
    const float *cosines, *sines;
    int half;
  };

  // Adds an embedding whose angles are position * inverse_frequencies[half]. `factor` multiplies sines and cosines.
  // With `axes`, each frequency has the index of its position among three, or `kIndexAxis` for the token's index. With
  // `shifts`, the third position times these is added to the angles.
  void add(const float* inverse_frequencies, int half, float factor, const int32_t* axes, const float* shifts) {
    ropes_.push_back({{inverse_frequencies, inverse_frequencies + half}, {}, {}, factor, {}});
    if (axes) ropes_.back().axes.assign(axes, axes + half);
    if (shifts) ropes_.back().shifts.assign(shifts, shifts + half);
  }

  void reserve(int rows) {
    for (Rope& rope : ropes_)
      rope.table.resize(std::max(rope.table.size(), 2 * rows * rope.inverse_frequencies.size()));
  }

  // Fills a row of every table. Different rows may be filled at the same time. `rotary` has three positions, for
  // embeddings with axes, or is null.
  void fill(int row, int position, const int32_t* rotary) {
    for (Rope& rope : ropes_) {
      const int half = int(rope.inverse_frequencies.size());
      float* cosines = rope.table.data() + size_t(row) * 2 * half;
      compute(rope, position, rotary, cosines);
    }
  }

  // Computes the sines and cosines of an embedding without axes for any position, in `memory`.
  Angles angles_at(int number, int position, std::vector<float>& memory) const {
    const int half = int(ropes_[number].inverse_frequencies.size());
    memory.resize(2 * half);
    compute(ropes_[number], position, nullptr, memory.data());
    return {memory.data(), memory.data() + half, half};
  }

  // Returns the factor on sines and cosines.
  float factor(int number) const { return ropes_[number].factor; }

  Angles angles(int number, int row) const {
    const Rope& rope = ropes_[number];
    const int half = int(rope.inverse_frequencies.size());
    const float* cosines = rope.table.data() + size_t(row) * 2 * half;
    return {cosines, cosines + half, half};
  }

 private:
  static constexpr int kIndexAxis = 3;

  struct Rope {
    std::vector<float> inverse_frequencies;
    std::vector<int32_t> axes;  // the axis of each frequency, or empty
    std::vector<float> shifts;  // or empty
    float factor;
    std::vector<float> table;  // [rows][cosines, sines]
  };

  static void compute(const Rope& rope, int position, const int32_t* rotary, float* cosines) {
    const int half = int(rope.inverse_frequencies.size());
    for (int i = 0; i < half; i++) {
      const bool uses_axis = rotary && !rope.axes.empty() && rope.axes[i] < kIndexAxis;
      float angle = float(uses_axis ? rotary[rope.axes[i]] : position) * rope.inverse_frequencies[i];
      if (rotary && !rope.shifts.empty()) angle += float(rotary[2]) * rope.shifts[i];
      cosines[i] = std::cos(angle) * rope.factor;
      cosines[half + i] = std::sin(angle) * rope.factor;
    }
  }

  std::vector<Rope> ropes_;
};

// Rotates the last elements of each head, in pairs of neighbors, by the angles or, with a `direction` of -1, by the
// negative angles.
inline void rotate_neighbors(const RotaryTables::Angles& angles, float* heads, int num_heads, int head_dim,
                             float direction) {
  for (float* x = heads + head_dim - 2 * angles.half; num_heads--; x += head_dim)
    for (int i = 0; i < angles.half; i++) {
      const float a = x[2 * i], b = x[2 * i + 1], cosine = angles.cosines[i], sine = direction * angles.sines[i];
      x[2 * i] = a * cosine - b * sine;
      x[2 * i + 1] = b * cosine + a * sine;
    }
}

}  // namespace engine
