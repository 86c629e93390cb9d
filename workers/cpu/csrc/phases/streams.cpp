#include "phases/streams.h"

#include <algorithm>
#include <cmath>

namespace engine {

namespace {

constexpr float kSmallestSquare = 1e-5f;

}  // namespace

float* Streams::scaled_product(const Rows& rows, int row, int index) const {
  const int size = model_.shape.hidden_size;
  const float* const first = rows.streams(row);
  float* const product = rows.qkv(row) + size_t(index) * size;
  const float target = model_.rows.dot(first, first, size) / float(size);
  const float own = std::max(model_.rows.dot(product, product, size) / float(size), kSmallestSquare);
  model_.rows.scale(product, std::sqrt(target) / std::sqrt(own), size);
  return product;
}

void Streams::expand(const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size;
  float* const streams = rows.streams(row);
  std::copy_n(rows.residual(row), size, streams);
  for (int i = 1; i < model_.shape.num_streams; i++)
    std::copy_n(scaled_product(rows, row, i - 1), size, streams + size_t(i) * size);
}

void Streams::reduce(const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size, count = model_.shape.num_streams;
  float* const mean = rows.residual(row);
  std::copy_n(rows.streams(row), size, mean);
  for (int i = 1; i < count; i++) model_.rows.add_scaled(mean, scaled_product(rows, row, i - 1), 1.0f, size);
  model_.rows.scale(mean, 1.0f / float(count), size);
}

void Streams::load(const Op& op, const Rows& rows, int row) const {
  std::copy_n(rows.streams(row) + op.first_column, model_.shape.hidden_size, rows.residual(row));
}

void Streams::modalities(const Op& op, const float* x, const Rows& rows, int row, float* out) const {
  const int size = model_.shape.hidden_size;
  float* const normed = rows.normed(row);
  model_.rows.rms_norm(x, op.altup->router_norm, op.eps, size, normed);
  model_.rows.scale(normed, 1.0f / float(size), size);
  for (int i = 0; i < model_.shape.num_streams; i++)
    out[i] = std::tanh(model_.rows.dot(normed, op.altup->router + size_t(i) * size, size));
}

// The projection holds the old streams while they are replaced.
void Streams::predict(const Op& op, const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size, count = model_.shape.num_streams;
  float *const streams = rows.streams(row), *const old = rows.qkv(row);
  float* const factors = old + size_t(count) * size;
  float* const modality = factors + count * count;
  modalities(op, streams + size_t(op.altup->active) * size, rows, row, modality);
  for (int i = 0; i < count * count; i++) factors[i] = model_.rows.dot(op.altup->predict + i * count, modality, count);
  std::copy_n(streams, size_t(count) * size, old);
  for (int i = 0; i < count; i++)
    for (int j = 0; j < count; j++)
      model_.rows.add_scaled(streams + size_t(i) * size, old + size_t(j) * size, factors[i * count + j], size);
  std::copy_n(streams + size_t(op.altup->active) * size, size, rows.residual(row));
}

void Streams::correct(const Op& op, const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size, count = model_.shape.num_streams;
  float *const streams = rows.streams(row), *const error = rows.qkv(row), *const computed = rows.residual(row);
  float* const modality = error + size;
  const float* const active = streams + size_t(op.altup->active) * size;
  modalities(op, computed, rows, row, modality);
  std::copy_n(computed, size, error);
  model_.rows.add_scaled(error, active, -1.0f, size);
  for (int i = 0; i < count; i++)
    model_.rows.add_scaled(streams + size_t(i) * size, error,
                           model_.rows.dot(op.altup->correct + i * count, modality, count) + 1.0f, size);
  std::copy_n(active, size, computed);
  if (op.altup->output_scale) model_.rows.multiply(computed, op.altup->output_scale, size, computed);
}

void Streams::add_block(const Op& op, const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size;
  float* const block = rows.block(row);
  model_.norm(op, block, block);
  for (int i = 1; i < model_.shape.num_streams; i++)
    model_.rows.add_scaled(rows.streams(row) + size_t(i) * size, block, 1.0f, size);
}

void Streams::repeat(const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size;
  for (int i = 0; i < model_.shape.num_streams; i++)
    std::copy_n(rows.residual(row), size, rows.streams(row) + size_t(i) * size);
}

float* Streams::sum(const HyperConnection& hyper, const Rows& rows, int row, float* out) const {
  const int size = model_.shape.hidden_size, count = model_.shape.num_streams, all = model_.shape.streams_size();
  const float* const streams = rows.streams(row);
  float* const logits = rows.qkv(row);
  std::fill_n(out, size, 0.0f);
  if (!hyper.num_factors) {
    for (int i = 0; i < count; i++) model_.rows.add_scaled(out, streams + size_t(i) * size, 1.0f / float(count), size);
    return logits;
  }
  const float square = model_.rows.dot(streams, streams, all) / float(all);
  const float inverse = 1.0f / std::sqrt(square + hyper.norm_eps);
  for (int i = 0; i < hyper.num_logits(count); i++) {
    const float product = model_.rows.dot(streams, hyper.weight + size_t(i) * all, all);
    const float scale = hyper.scale[std::min(i / count, int(hyper.num_factors))];
    logits[i] = product * inverse * scale + hyper.bias[i];
  }
  for (int i = 0; i < hyper.num_factors * count; i++) logits[i] = 1.0f / (1.0f + std::exp(-logits[i]));
  for (int i = 0; i < count; i++) model_.rows.add_scaled(out, streams + size_t(i) * size, logits[i] + hyper.eps, size);
  return logits;
}

void Streams::mix(const Op& op, const Rows& rows, int row) const {
  if (op.hyper->norm) return mix_normed(*op.hyper, rows, row);
  sum(*op.hyper, rows, row, rows.residual(row));
}

void Streams::norm_stream(const HyperConnection& hyper, const Rows& rows, int row, int stream, float* out) const {
  const int size = model_.shape.hidden_size;
  const size_t first = size_t(stream) * size;
  model_.rows.rms_norm(rows.streams(row) + first, hyper.norm + first, hyper.norm_eps, size, out);
}

void Streams::norm(const Op& op, const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size, all = model_.shape.streams_size();
  float* const normed = rows.qkv(row);
  for (int i = 0; i < model_.shape.num_streams; i++) norm_stream(*op.hyper, rows, row, i, normed + size_t(i) * size);
  quantize_rows(op.activation_kind, normed, all, 1, all,
                rows.activations(0, row, activation_row_bytes(op.activation_kind, all)));
}

// The projection has the logits of the elements' factors.
void Streams::mix_normed(const HyperConnection& hyper, const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size, count = model_.shape.num_streams, all = model_.shape.streams_size();
  float *const mean = rows.residual(row), *const normed = rows.normed(row);
  float* const factors = rows.kept(row) + size;
  std::fill_n(mean, size, 0.0f);
  std::fill_n(factors, count, 0.0f);
  for (int i = 0; i < count; i++) {
    norm_stream(hyper, rows, row, i, normed);
    for (int j = 0; hyper.weight && j < count; j++)
      factors[j] += model_.rows.dot(normed, hyper.weight + size_t(j) * all + size_t(i) * size, size);
    model_.rows.gate(Activation::sigmoid, rows.qkv(row) + size_t(i) * size, normed, size, normed);
    model_.rows.add_scaled(mean, normed, 1.0f / float(count), size);
  }
  for (int j = 0; j < count; j++) factors[j] = hyper.output_scale / (1.0f + std::exp(-factors[j] / float(count)));
  std::copy_n(mean, size, rows.kept(row));
}

// The projection holds the old streams, behind the factors, while they are replaced.
void Streams::mix_all(const HyperConnection& hyper, const Rows& rows, int row, float* factors) const {
  const int size = model_.shape.hidden_size, count = model_.shape.num_streams;
  for (int i = 0; i < count; i++) {
    float* const of_stream = factors + i * count;
    const float most = *std::max_element(of_stream, of_stream + count);
    float sum = 0.0f;
    for (int j = 0; j < count; j++) sum += of_stream[j] = std::exp(of_stream[j] - most);
    for (int j = 0; j < count; j++) of_stream[j] = of_stream[j] / sum + hyper.eps;
  }
  // Divides `count` factors that are `stride` apart by their sum.
  const auto divide = [&](float* first, int stride) {
    float sum = hyper.eps;
    for (int i = 0; i < count; i++) sum += first[i * stride];
    for (int i = 0; i < count; i++) first[i * stride] /= sum;
  };
  for (int iteration = 0; iteration < hyper.num_iterations; iteration++) {
    for (int i = 0; iteration && i < count; i++) divide(factors + i * count, 1);
    for (int j = 0; j < count; j++) divide(factors + j, count);
  }
  float *const streams = rows.streams(row), *const old = factors + count * count;
  std::copy_n(streams, size_t(count) * size, old);
  std::fill_n(streams, size_t(count) * size, 0.0f);
  for (int i = 0; i < count; i++)
    for (int j = 0; j < count; j++)
      model_.rows.add_scaled(streams + size_t(j) * size, old + size_t(i) * size, factors[i * count + j], size);
}

// Computes the sum and the factors again, so that nothing has to be kept for them.
void Streams::update(const Op& op, const Rows& rows, int row) const {
  const HyperConnection& hyper = *op.hyper;
  if (hyper.norm) return add_output(rows, row);
  const int size = model_.shape.hidden_size, count = model_.shape.num_streams;
  float *const block = rows.residual(row), *const input = rows.normed(row);
  float* const factors = sum(hyper, rows, row, input) + count;
  model_.rows.add_scaled(block, input, -1.0f, size);
  if (hyper.num_iterations) mix_all(hyper, rows, row, factors + count);
  const float eps = hyper.num_iterations ? 0.0f : hyper.eps;
  for (int i = 0; i < count; i++) {
    const float factor = factors[i] * hyper.output_scale + eps;
    model_.rows.add_scaled(rows.streams(row) + size_t(i) * size, block, factor, size);
  }
}

// The row keeps the mean, and behind it the factors.
void Streams::attend(const Op& op, const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size, count = op.num_columns;
  const bool is_block = op.target == LinearTarget::block;
  const float* const streams = rows.streams(row) + op.first_column;
  float *const mean = is_block ? rows.block(row) : rows.residual(row), *const factors = rows.kept(row) + size;
  float* const roots = factors + count;
  for (int i = 0; i < count; i++) {
    const float* const stream = streams + size_t(i) * size;
    const float square = model_.rows.dot(stream, stream, size) / float(size);
    roots[i] = std::sqrt(square + op.eps);
    factors[i] = model_.rows.dot(stream, op.vectors[0], size) / roots[i];
  }
  const float most = *std::max_element(factors, factors + count);
  float sum = 0.0f;
  for (int i = 0; i < count; i++) sum += factors[i] = std::exp(factors[i] - most);
  std::fill_n(mean, size, 0.0f);
  for (int i = 0; i < count; i++) {
    const float factor = factors[i] / sum / (op.norms_values ? roots[i] : 1.0f);
    model_.rows.add_scaled(mean, streams + size_t(i) * size, factor, size);
  }
  if (!is_block) std::copy_n(mean, size, rows.kept(row));
}

void Streams::copy(const Op& op, const Rows& rows, int row) const {
  float* const streams = rows.streams(row);
  std::copy_n(streams + op.first_column, op.num_columns, streams + model_.shape.streams_size() - op.num_columns);
}

void Streams::join_block(const Op& op, const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size;
  float* const joined = rows.qkv(row) + op.first_column;
  model_.rows.rms_norm(rows.residual(row), op.vectors[0], op.eps, size, joined);
  model_.rows.rms_norm(rows.block(row), op.vectors[0], op.eps, size, joined + size);
  quantize_rows(op.activation_kind, joined, 2 * size, 1, 2 * size,
                rows.activations(0, row, activation_row_bytes(op.activation_kind, 2 * size)));
}

void Streams::gate_block(const Op& op, const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size;
  float *const x = rows.residual(row), *const block = rows.block(row);
  const float* const forget = rows.qkv(row) + op.first_column;
  const float* const gain = forget + size;
  for (int i = 0; i < size; i++) x[i] = (1.0f - std::tanh(forget[i])) * x[i] + std::tanh(gain[i]) * block[i];
  std::copy_n(x, size, rows.kept(row));
}

void Streams::add_to_one(const Op& op, const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size;
  float *const block = rows.residual(row), *const stream = rows.streams(row) + op.first_column;
  model_.rows.add_scaled(block, rows.kept(row), -1.0f, size);
  model_.rows.scale(stream, op.scale, size);
  model_.rows.add_scaled(stream, block, 1.0f, size);
}

void Streams::add_output(const Rows& rows, int row) const {
  const int size = model_.shape.hidden_size;
  float *const block = rows.residual(row), *const kept = rows.kept(row);
  model_.rows.add_scaled(block, kept, -1.0f, size);
  for (int i = 0; i < model_.shape.num_streams; i++)
    model_.rows.add_scaled(rows.streams(row) + size_t(i) * size, block, kept[size + i], size);
}

}  // namespace engine
