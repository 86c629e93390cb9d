// The layout of a layer's keys and values.
//
// For every block and head there are keys [head_dim / pair][block_size][pair], then values [block_size / pair][padded
// head_dim][pair]. `pair` is the number of elements that one instruction multiplies and adds: 2 in bf16, 4 in int8,
// otherwise 1. head_dim is padded to whole vectors. So one vector contains an element of each of sixteen keys, or
// sixteen elements of a value. Numbers in int8 are multiples of their token's scale. The scales of keys, [block_size]
// in float32, follow the keys, and the scales of values follow the values.
//
// Stored numbers are finite. Numbers that are too large become the largest finite number of the format, and NaN and
// infinity become zero. Otherwise a value that remains from the block's previous owner, and is masked now, would turn 0
// * value into NaN.
//
// A block may also contain keys and values of other layers, before or after those of this layer.
//
// The keys and values of all heads may be followed by index keys, which are stored like the keys of one more head. With
// latent attention, the elements of a key are followed by those of its index key instead. Other numbers may follow an
// index key, from which the index key of a group of keys is computed.
//
// With latent attention, a block has only keys. Their first elements are the values: attention copies those of a chunk
// to the layout of values before it uses them for all of its rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine {

enum class KVFormat : int32_t { bf16 = 0, f16 = 1, f32 = 2, int8 = 3 };

struct KVLayout {
  KVFormat format;
  int32_t num_kv_heads, head_dim, block_size;
  int32_t value_dim;         // the size of a value
  bool has_values;           // if false, values are the first elements of keys
  size_t block_stride;       // bytes from a block to the next
  int32_t index_dim = 0;     // the elements of an index key, by which tokens choose keys; 0 without one
  int32_t index_inputs = 0;  // the other numbers behind an index key, if keys are chosen in groups; or 0

  // Returns the layout in which the index keys are the keys. If there are values, its blocks begin behind those.
  KVLayout of_index() const {
    if (has_values) return {format, 1, index_dim, block_size, 0, false, block_stride};
    KVLayout index = *this;
    index.head_dim = index_dim;
    return index;
  }
  // Returns the layout of index keys, and of the numbers behind them, that have blocks of their own: that of keys
  // without any other elements.
  KVLayout of_own_index() const { return {format, 1, 0, block_size, 0, false, block_stride, index_dim, index_inputs}; }
  int stored_dim() const { return has_values ? head_dim : head_dim + index_dim + index_inputs; }

  size_t element_bytes() const { return format == KVFormat::f32 ? 4 : format == KVFormat::int8 ? 1 : 2; }
  int padded_head_dim() const { return (stored_dim() + 15) / 16 * 16; }
  int padded_value_dim() const { return (value_dim + 15) / 16 * 16; }
  // Returns where the scales of a head's keys, or of its values, begin.
  size_t scale_offset() const { return size_t(block_size) * padded_head_dim() * element_bytes(); }
  // Returns the bytes of one head's keys, or of its values, in a block. Both have the same size if there are values.
  size_t head_bytes() const { return scale_offset() + (format == KVFormat::int8 ? block_size * sizeof(float) : 0); }
  // Returns the bytes that a block has for one head.
  size_t kv_head_bytes() const { return (has_values ? 2 : 1) * head_bytes(); }
  // Returns the bytes that a block has for all heads.
  size_t heads_bytes() const { return num_kv_heads * kv_head_bytes(); }
  // Returns the bytes that a block has for the layer.
  size_t layer_bytes() const { return heads_bytes() + (has_values && index_dim ? of_own_index().heads_bytes() : 0); }
  size_t key_offset(int block, int kv_head) const {
    return size_t(block) * block_stride + size_t(kv_head) * kv_head_bytes();
  }
  size_t value_offset(int block, int kv_head) const { return key_offset(block, kv_head) + head_bytes(); }
};

}  // namespace engine
