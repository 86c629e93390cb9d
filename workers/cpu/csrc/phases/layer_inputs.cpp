#include "phases/layer_inputs.h"

#include <algorithm>
#include <cmath>

#include "model/token_digits.h"

namespace engine {

void LayerInputs::embed(const Op& op, int row) const {
  const PackedWeight& table = *op.parts[0];
  const int token = slice_.step.input_ids[slice_.first_token + row];
  const int index = (token < op.num_columns ? token : 0) - op.first_column;
  float* const out = op.target == LinearTarget::part ? ranks_.own_part(row) : inputs_.floats() + size_t(row) * table.k;
  if (index < 0 || index >= table.n) return void(std::fill_n(out, table.k, 0.0f));
  unpack_weight_row(table, index, out);
  model_.rows.scale(out, op.scale, table.k);
}

void LayerInputs::keep_token(int r) const { write_digits(slice_.step.input_ids[slice_.first_token + r], row(r)); }

void LayerInputs::add(const Op& op, const Rows& rows, int r) const {
  const int size = model_.shape.input_size;
  float *const product = rows.qkv(r), *const inputs = row(r);
  model_.rows.scale(product, op.scale, size);
  for (int i = 0; i < size; i += op.num_columns)
    model_.rows.rms_norm(product + i, op.vectors[0], op.eps, op.num_columns, product + i);
  if (!op.num_stored) return void(std::copy_n(product, size, inputs));
  model_.rows.add_scaled(inputs, product, 1.0f, size);
  model_.rows.scale(inputs, std::sqrt(0.5f), size);
}

void LayerInputs::quantize(const Op& op, const Rows& rows, int r) const {
  const int size = op.num_columns;
  const size_t row_bytes = activation_row_bytes(op.activation_kind, size);
  quantize_rows(op.activation_kind, row(r) + op.first_column, size, 1, size, rows.activations(0, r, row_bytes));
}

void LayerInputs::join(const Op& op, const Rows& rows, int r) const {
  const int hidden_size = model_.shape.hidden_size, size = hidden_size + model_.shape.input_size;
  float* const both = rows.qkv(r);
  std::copy_n(rows.residual(r), hidden_size, both);
  std::copy_n(row(r), model_.shape.input_size, both + hidden_size);
  model_.rows.rms_norm(both, op.vectors[0], op.eps, size, both);
  quantize_rows(op.activation_kind, both, size, 1, size,
                rows.activations(0, r, activation_row_bytes(op.activation_kind, size)));
}

void LayerInputs::gate(const Op& op, const Rows& rows, int r) const {
  const int size = op.num_columns;
  float* const gates = rows.qkv(r);
  model_.rows.gate(model_.shape.activation, gates, row(r) + op.first_column, size, gates);
  quantize_rows(op.activation_kind, gates, size, 1, size,
                rows.activations(1, r, activation_row_bytes(op.activation_kind, size)));
}

void LayerInputs::chain(const Op& op, const Rows& rows, int row) const {
  float *const x = rows.qkv(row), *const passed = this->row(row);
  if (const float* factors = op.vectors[0]) {
    model_.rows.multiply(passed, factors, op.num_columns, passed);
    model_.rows.add_scaled(x, passed, 1.0f, op.num_columns);
  }
  std::copy_n(x, op.num_columns, passed);
  model_.rows.rms_norm(x, op.vectors[1], op.eps, op.num_columns, x);
}

}  // namespace engine
