// What lies between two operations.
#pragma once

#include <algorithm>

#include "program/model.h"
#include "runtime/buffer.h"

namespace engine {

// Intermediate results of rows of the slice, from row `first` on.
class Rows {
 public:
  explicit Rows(const ModelShape& shape)
      : hidden_size_(shape.hidden_size),
        qkv_size_((shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim),
        widest_(std::max({shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim})) {}

  void reserve(int rows) {
    residual_.reserve(sizeof(float) * rows * hidden_size_);
    block_.reserve(sizeof(float) * rows * hidden_size_);
    qkv_.reserve(sizeof(float) * rows * qkv_size_);
    for (Buffer& buffer : activations_) buffer.reserve(rows * (sizeof(float) * widest_ + 64));
  }

  float* residual(int row) const { return residual_.floats() + (row - first) * hidden_size_; }
  float* block(int row) const { return block_.floats() + (row - first) * hidden_size_; }
  float* qkv(int row) const { return qkv_.floats() + (row - first) * qkv_size_; }
  // Rows of activations are `row_bytes` apart.
  uint8_t* activations(int source, int row, size_t row_bytes) const {
    return activations_[source].bytes() + (row - first) * row_bytes;
  }

  int first = 0;

 private:
  Buffer residual_, block_, qkv_, activations_[2];
  size_t hidden_size_, qkv_size_, widest_;
};

}  // namespace engine
