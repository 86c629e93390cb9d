#include "phases/head.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa/isa.h"

namespace engine {

void Head::begin_step(Step& step) {
  activations_.reserve(step.num_logit_rows * (sizeof(float) * model_.shape.hidden_size + 64));
  if (ranks_.are_several() && (step.sampling || step.logits))
    own_logits_.reserve(sizeof(float) * step.num_logit_rows * ranks_.most_tokens());
  if (step.sampling) logit_maxima_.reserve(sizeof(float) * step.num_logit_rows * logit_blocks(model_.shape.vocab_size));
  if (step.sampling && !step.logits) {
    logits_.reserve(sizeof(float) * step.num_logit_rows * model_.shape.vocab_size);
    step.logits = logits_.floats();
  }
}

const Adapter* Head::adapter_of(const Step& step, int row) const {
  const Op& op = model_.ops.back();
  const int number = op.adapters && step.adapters ? step.adapters[step.logit_rows[row]] : -1;
  return number < 0 ? nullptr : &op.adapters[number];
}

template <class Run>
void Head::for_adapters(const Step& step, int first, int end, Run run) const {
  for (int row = first; row < end;) {
    const Adapter* const adapter = adapter_of(step, row);
    const int start = row++;
    while (row < end && adapter_of(step, row) == adapter) row++;
    if (adapter) run(*adapter, start, row - start);
  }
}

int Head::begin_product(const Step& step) {
  const Op& op = model_.ops.back();
  const int rows = step.num_logit_rows, hidden_size = model_.shape.hidden_size;
  const size_t row_bytes = activation_row_bytes(op.input_kind, hidden_size);
  for (int r = 0; r < rows; r++)
    quantize_rows(op.input_kind, step.hidden + step.logit_rows[r] * step.hidden_stride, hidden_size, 1, hidden_size,
                  activations_.bytes() + r * row_bytes);
  if (op.adapters && step.adapters) low_rank_.reserve(sizeof(float) * rows * op.adapter_rank);
  for_adapters(step, 0, rows, [&](const Adapter& adapter, int row, int count) {
    Readahead none;
    if (adapter.down)
      linear_rows(*adapter.down, op.input_kind, activations_.bytes() + row * row_bytes, count, 0, adapter.up[0].rank,
                  low_rank(row), op.adapter_rank, none);
  });
  const int tiles = products_.begin(op, rows, 1);
  if (step.tokens && !step.sampling) best_.reserve(size_t(rows) * products_.column_tiles(op) * sizeof(Best));
  return tiles;
}

void Head::run_product(const Step& step, Tile& tile, Scratch& scratch) {
  const Op& op = model_.ops.back();
  const PackedWeight& weight = *op.parts[0];
  const Columns columns = products_.columns_of(op, tile, step.num_logit_rows);
  const int begin = columns.begin, size = columns.size();
  const size_t row_bytes = activation_row_bytes(op.input_kind, weight.k);
  float* out = scratch.tile.get();
  scratch.readahead.next_weights = products_.weights_after(op, tile);
  if (size)
    linear_rows(weight, op.input_kind, activations_.bytes() + columns.first_row * row_bytes, columns.num_rows, begin,
                columns.end, out, size, scratch.readahead);
  scratch.readahead.next_weights = nullptr;
  for_adapters(
      step, columns.first_row, columns.first_row + columns.num_rows, [&](const Adapter& adapter, int row, int count) {
        float* const sums = out + size_t(row - columns.first_row) * size;
        Readahead none;
        if (adapter.whole && size)
          linear_rows(*adapter.whole, op.input_kind, activations_.bytes() + row * row_bytes, count, begin, columns.end,
                      sums, size, none);
        if (adapter.down)
          model_.rows.add_low_rank(adapter.up[0], low_rank(row), op.adapter_rank, count, begin, columns.end, sums);
      });
  if (!tile.commit()) return;
  const int column_tiles = products_.column_tiles(op);
  for (int row = columns.first_row; row < columns.first_row + columns.num_rows; row++, out += size) {
    if (op.vectors[0]) model_.rows.add_scaled(out, op.vectors[0] + begin, 1.0f, size);
    if (op.scale != 1.0f) model_.rows.scale(out, op.scale, size);
    if (op.attention.softcap != 0) model_.rows.soft_cap(out, op.attention.softcap, size);
    // Do not let the product write to the logits directly: their rows are pages apart and would contend for the same
    // cache lines.
    if (step.logits)
      std::memcpy((ranks_.are_several() ? own_logits_.floats() : step.logits) + size_t(row) * weight.n + begin, out,
                  sizeof(float) * size);
    if (step.sampling && !ranks_.are_several())
      kernels().sampling->block_maxima(out, size, logit_maxima(row) + begin / kLogitBlock);
    if (!step.tokens || step.sampling) continue;
    Best& best = bests()[size_t(row) * column_tiles + columns.index];
    best = {-INFINITY, begin};
    if (size == 0) continue;
    const int token = model_.rows.argmax(out, size, &best.logit);
    best.token = token < 0 ? -1 : begin + token;
  }
}

int Head::begin_choice(const Step& step) {
  if (!step.num_logit_rows) return 0;
  if (ranks_.are_several() && step.logits && step.logit_rows) gather_logits(step);
  if (!step.tokens) return 0;
  if (step.sampling) return step.num_logit_rows;
  take_most_likely(step);
  return 0;
}

void Head::gather_logits(const Step& step) {
  const int own = ranks_.num_tokens_of(ranks_.rank());
  ranks_.exchange_rows(
      step.num_logit_rows, sizeof(float) * ranks_.most_tokens(),
      [&](int row, uint8_t* part) { std::memcpy(part, own_logits_.floats() + size_t(row) * own, sizeof(float) * own); },
      [&](int row, int rank, const uint8_t* part) {
        std::memcpy(step.logits + size_t(row) * model_.shape.vocab_size + ranks_.first_token_of(rank), part,
                    sizeof(float) * ranks_.num_tokens_of(rank));
      });
}

// Returns the best token in this rank's part of the vocabulary.
Head::Best Head::most_likely(int row) const {
  const int tiles = products_.column_tiles(model_.ops.back());
  const Best* best = bests() + size_t(row) * tiles;
  Best winner = best[0];
  for (int i = 1; i < tiles; i++) winner = likelier(winner, best[i]);
  if (ranks_.are_several() && winner.token >= 0) winner.token += ranks_.first_token_of(ranks_.rank());
  return winner;
}

void Head::take_most_likely(const Step& step) {
  const int rows = step.num_logit_rows;
  winners_.resize(rows);
  for (int row = 0; row < rows; row++) winners_[row] = most_likely(row);
  if (ranks_.are_several()) exchange_winners(rows);
  for (int row = 0; row < rows; row++) {
    const Best& winner = winners_[row];
    step.tokens[row] = winner.token < 0 || winner.logit == INFINITY ? kNotANumber
                       : winner.logit == -INFINITY                  ? kNothingAllowed
                                                                    : winner.token;
  }
}

void Head::exchange_winners(int rows) {
  ranks_.exchange_rows(
      rows, sizeof(Best), [&](int row, uint8_t* part) { std::memcpy(part, &winners_[row], sizeof(Best)); },
      [&](int row, int rank, const uint8_t* part) {
        Best best;
        std::memcpy(&best, part, sizeof(Best));
        winners_[row] = rank ? likelier(winners_[row], best) : best;
      });
}

void Head::choose(const Step& step, Tile& tile, Scratch& scratch) {
  if (!tile.commit()) return;
  const int row = tile.index, vocab_size = model_.shape.vocab_size;
  float* logits = step.logits + size_t(row) * vocab_size;
  float* maxima = logit_maxima(row);
  // If this program has not computed whole rows of logits, it does not have their maxima either.
  if (!step.logit_rows || ranks_.are_several()) kernels().sampling->block_maxima(logits, vocab_size, maxima);
  step.tokens[row] = scratch.chooser.choose(*step.sampling, row, logits, maxima);
}

}  // namespace engine
