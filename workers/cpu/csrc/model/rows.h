// The intermediate results between two operations.
#pragma once

#include <algorithm>

#include "model/model.h"
#include "runtime/buffer.h"

namespace engine {

// The intermediate results of the rows of a slice, from row `first` on.
class Rows {
 public:
  explicit Rows(const ModelShape& shape)
      : hidden_size_(shape.hidden_size),
        qkv_size_(shape.projection_size),
        router_size_(shape.router_size),
        widest_(
            std::max({shape.hidden_size, shape.intermediate_size, shape.mixed_size, shape.num_heads * shape.head_dim})),
        streams_size_(shape.streams_size()),
        keeps_block_(shape.keeps_block) {}

  void reserve(int rows) {
    residual_.reserve(sizeof(float) * rows * hidden_size_);
    block_.reserve(sizeof(float) * rows * hidden_size_);
    streams_.reserve(sizeof(float) * rows * streams_size_);
    kept_.reserve(sizeof(float) * rows * kept_size_);
    shortcuts_.reserve(sizeof(float) * rows * shortcut_size_);
    if (keeps_block_) normed_.reserve(sizeof(float) * rows * hidden_size_);
    qkv_.reserve(sizeof(float) * rows * qkv_size_);
    router_.reserve(sizeof(float) * rows * router_size_);
    low_rank_.reserve(sizeof(float) * rows * low_rank_size_);
    for (Buffer& buffer : activations_) buffer.reserve(rows * (sizeof(float) * widest_ + 64));
  }

  void release() {
    for (Buffer* buffer : {&residual_, &block_, &streams_, &kept_, &shortcuts_, &normed_, &qkv_, &router_, &low_rank_,
                           &activations_[0], &activations_[1]})
      buffer->release();
  }

  float* residual(int row) const { return residual_.floats() + (row - first) * hidden_size_; }
  // The hidden states of a token with alternating updates, one after the other.
  float* streams(int row) const { return streams_.floats() + (row - first) * streams_size_; }
  // Makes room for this many numbers per row that an operation passes on to a later one.
  void widen_kept(size_t size) { kept_size_ = std::max(kept_size_, size); }
  float* kept(int row) const { return kept_.floats() + (row - first) * kept_size_; }
  // Makes room for the output of a block that is added to the stream after later blocks.
  void keep_shortcuts() { shortcut_size_ = hidden_size_; }
  float* shortcut(int row) const { return shortcuts_.floats() + (row - first) * shortcut_size_; }
  float* block(int row) const { return block_.floats() + (row - first) * hidden_size_; }
  // The residual stream after a norm. It uses the memory of the block, unless that must be kept.
  float* normed(int row) const { return keeps_block_ ? normed_.floats() + (row - first) * hidden_size_ : block(row); }
  float* qkv(int row) const { return qkv_.floats() + (row - first) * qkv_size_; }
  // The number of floats from one row of `qkv` to the next.
  size_t qkv_stride() const { return qkv_size_; }
  float* router_logits(int row) const { return router_.floats() + (row - first) * router_size_; }
  // Makes room for this many numbers per row between the two factors of a matrix.
  void widen_low_rank(size_t size) { low_rank_size_ = std::max(low_rank_size_, size); }
  float* low_rank(int row) const { return low_rank_.floats() + (row - first) * low_rank_size_; }
  // Rows of activations are `row_bytes` apart.
  uint8_t* activations(int source, int row, size_t row_bytes) const {
    return activations_[source].bytes() + (row - first) * row_bytes;
  }

  // Copies the data that operations pass on within a row from one row to another: the residual stream, the streams, and
  // the numbers that are kept.
  void copy_streams(const Rows& source, int row) const {
    std::copy_n(source.residual(row), hidden_size_, residual(row));
    std::copy_n(source.kept(row), kept_size_, kept(row));
    std::copy_n(source.streams(row), streams_size_, streams(row));
  }

  int first = 0;

 private:
  Buffer residual_, block_, streams_, kept_, shortcuts_, normed_, qkv_, router_, low_rank_, activations_[2];
  size_t hidden_size_, qkv_size_, router_size_, widest_, streams_size_, kept_size_ = 0, shortcut_size_ = 0,
                                                                        low_rank_size_ = 0;
  bool keeps_block_;
};

}  // namespace engine
