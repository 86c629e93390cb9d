// Memory that is reused from step to step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace engine {

// A buffer that is aligned to 64 bytes and grows when necessary. Growing discards its contents.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  void reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    std::free(data_);
    bytes_ = (bytes + 63) / 64 * 64;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(64, bytes_));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  void release() {
    std::free(data_);
    data_ = nullptr;
    bytes_ = 0;
  }
  uint8_t* bytes() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace engine
