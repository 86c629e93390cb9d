#include "phases/attend/entries.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace engine {

namespace {

constexpr int kRowsAtOnce = 16;

// Copies units of rows to columns that are kChunk units apart.
template <class Unit>
void copy_rows(const uint8_t* const* rows, int num_rows, int num_units, uint8_t* out) {
  auto* columns = reinterpret_cast<Unit*>(out);
  for (int unit = 0; unit < num_units; unit++, columns += kChunk)
    for (int i = 0; i < num_rows; i++) std::memcpy(columns + i, rows[i] + unit * sizeof(Unit), sizeof(Unit));
}

}  // namespace

uint8_t* Entries::address(int layer, int group, int sequence, int position, size_t first_element, int row,
                          int size) const {
  const StepGroup& blocks = slice_.step.groups[group];
  const int32_t* const table = blocks.block_table + slice_.table_row(sequence) * blocks.block_table_stride;
  const size_t element = first_element + size_t(row) * size;
  return slice_.step.kv_caches[layer] + table[position / model_.shape.block_size] * size_t(model_.shape.block_bytes) +
         element * row_layout(size).element_bytes();
}

uint8_t* Entries::entry(const Op& op, int sequence, int number) const {
  const Compression& entries = *op.compression;
  const int end = (number + 1) * entries.rate - 1, row = end % model_.shape.block_size / entries.rate;
  return address(entries.layer, entries.group, sequence, end, 0, row, op.head_dim + entries.index_dim);
}

void Entries::store_inputs(const Op& op, int row, const float* inputs) const {
  const int slot = slice_.step.groups[op.group].slot_mapping[slice_.first_token + row];
  const int block_size = model_.shape.block_size;
  const KVLayout layout = row_layout(op.num_columns);
  const size_t element = size_t(op.head_dim) * block_size + size_t(slot % block_size) * op.num_columns;
  uint8_t* const block = slice_.step.kv_caches[op.layer] + slot / block_size * size_t(model_.shape.block_bytes);
  model_.attention.store(layout, block + element * layout.element_bytes(), 0, 0, 0, inputs, nullptr);
}

void Entries::store(const Op& op, int row, int sequence) const {
  const Compression& entries = *op.compression;
  const int position = slice_.step.positions[slice_.first_token + row], span = entries.span();
  if ((position + 1) % entries.rate) return;
  const int size = op.head_dim, index_dim = entries.index_dim;
  const int of_entry = entries.num_inputs(size), stride = of_entry + entries.num_inputs(index_dim);
  const int before = position + 1 - span, first_token = std::max(-before, 0);
  std::vector<float> inputs(size_t(span) * stride), result(size + index_dim), memory;
  for (int i = first_token; i < span; i++) {
    const size_t first_element = size_t(size) * model_.shape.block_size;
    const uint8_t* const stored = address(op.layer, op.group, sequence, before + i, first_element,
                                          (before + i) % model_.shape.block_size, stride);
    model_.attention.load(row_layout(stride), stored, 0, 0, 0, stride, &inputs[size_t(i) * stride]);
  }
  const RotaryTables::Angles angles = ropes_.angles_at(op.rope, position + 1 - entries.rate, memory);
  summarize(op, inputs.data(), stride, first_token, size, entries.biases, entries.norm, angles, result.data());
  if (index_dim)
    summarize(op, inputs.data() + of_entry, stride, first_token, index_dim, entries.index_biases, entries.index_norm,
              angles, result.data() + size);
  model_.attention.store(row_layout(size + index_dim), entry(op, sequence, position / entries.rate), 0, 0, 0,
                         result.data(), nullptr);
}

void Entries::summarize(const Op& op, const float* inputs, int stride, int first_token, int size, const float* biases,
                        const float* norm, const RotaryTables::Angles& angles, float* out) const {
  const Compression& entries = *op.compression;
  const int half = entries.num_inputs(size) / 2;
  std::vector<float> most(size, -INFINITY), weights(size);
  // If entries overlap, the last `rate` tokens contribute the second half of their values and logits.
  const auto values_of = [&](int token) {
    return inputs + size_t(token) * stride + (entries.overlaps && token >= entries.rate ? size : 0);
  };
  for (int token = first_token; token < entries.span(); token++)
    for (int d = 0; d < size; d++)
      most[d] = std::max(most[d], values_of(token)[half + d] + biases[size_t(token) * size + d]);
  std::fill_n(out, size, 0.0f);
  for (int token = first_token; token < entries.span(); token++)
    for (int d = 0; d < size; d++) {
      const float weight = std::exp(values_of(token)[half + d] + biases[size_t(token) * size + d] - most[d]);
      weights[d] += weight;
      out[d] += weight * values_of(token)[d];
    }
  for (int d = 0; d < size; d++) out[d] /= weights[d];
  model_.rows.rms_norm(out, norm, op.eps, size, out);
  rotate_neighbors(angles, out, 1, size, 1.0f);
}

KVLayout Entries::copied_layout(const Op& op, bool are_index_keys) const {
  const int size = are_index_keys ? 0 : op.head_dim, index_dim = are_index_keys ? op.compression->index_dim : 0;
  KVLayout layout = {model_.shape.kv_format, 1, size, kChunk, size, false, 0, index_dim};
  layout.block_stride = layout.layer_bytes();
  return layout;
}

// The keys of the last chunk that do not exist are zero, because attention multiplies them by zero.
void Entries::copy(const Op& op, int sequence, bool are_index_keys, CopiedKeys& out) const {
  const KVLayout layout = copied_layout(op, are_index_keys);
  const int first = are_index_keys ? op.head_dim : 0, size = layout.stored_dim();
  const int count = int(out.numbers.size()), blocks = (count + kChunk - 1) / kChunk;
  const size_t element_bytes = layout.element_bytes();
  const size_t unit_bytes = layout.format == KVFormat::bf16 ? 2 * element_bytes : element_bytes;
  const int num_units = int(size * element_bytes / unit_bytes);
  out.keys.reserve(blocks * layout.block_stride);
  for (int block = int(out.blocks.size()); block < blocks; block++) out.blocks.push_back(block);
  if (count % kChunk) std::memset(out.keys.bytes() + (blocks - 1) * layout.block_stride, 0, layout.block_stride);
  for (int i = 0; i < count; i += kRowsAtOnce) {
    const uint8_t* rows[kRowsAtOnce];
    const int num_rows = std::min(count - i, kRowsAtOnce);
    for (int j = 0; j < num_rows; j++) rows[j] = entry(op, sequence, out.numbers[i + j]) + first * element_bytes;
    uint8_t* const columns = out.keys.bytes() + i / kChunk * layout.block_stride + i % kChunk * unit_bytes;
    if (unit_bytes == sizeof(uint32_t))
      copy_rows<uint32_t>(rows, num_rows, num_units, columns);
    else
      copy_rows<uint16_t>(rows, num_rows, num_units, columns);
  }
}

}  // namespace engine
