#include "phases/experts.h"

#include "model/token_digits.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace engine {

namespace {

// The maximum number of rows of a tile.
constexpr int kRowBlock = 64;
// With more choices than this, tiles are smaller, so that all threads finish at about the same time.
constexpr int kManyChoices = 64;

// The logit of the shared experts' gate follows those of the experts.
float shared_factor(const Router& router, const float* logits) {
  return 1.0f / (1.0f + std::exp(-logits[router.num_logits()]));
}

// The experts of two mixtures, and adjugate experts, have different sizes.
int most_elements(const ExpertLayer& layer) {
  int most = layer.down[0].k;
  for (int e = 1; e < layer.count; e++) most = std::max(most, int(layer.down[e].k));
  return most;
}

}  // namespace

void Experts::add_op(const Op& op) {
  if (op.kind != OpKind::gated_experts) return;
  divisions_.resize(op.layer + 1);
  most_chosen_ = std::max(most_chosen_, op.experts->router.num_chosen);
  most_elements_ = std::max(most_elements_, most_elements(*op.experts));
  largest_output_ = std::max(largest_output_, op.experts->size);
}

void Experts::reserve(int rows) {
  const size_t choices = size_t(rows) * most_chosen_;
  chosen_.resize(choices);
  weights_.resize(choices);
  places_.resize(choices);
  activations_.reserve(choices * (sizeof(float) * most_elements_ + 64));
  outputs_.reserve(choices * sizeof(float) * largest_output_);
  own_outputs_ = outputs_.floats();
}

void Experts::route(const Op& op, const Rows& rows, int row, const float* inputs) {
  const Router& router = op.experts->router;
  const size_t first = size_t(row) * router.num_chosen;
  const int token = router.reads_token() ? token_of_digits(inputs) : 0;
  choose_experts(router, rows.router_logits(row), token, &chosen_[first], &weights_[first]);
}

int Experts::begin_gated(const Op& op, const Rows& rows, int num_rows) {
  Division& division = divisions_[op.layer];
  if (exchange_)
    dispatch(op, division, rows, num_rows);
  else
    order_own(op, division, num_rows);
  division.serial = next_serial_;
  next_serial_ += division.starts.back();
  divide(op.experts->gate, division, division.gated);
  divide(op.experts->down, division, division.output);
  return int(division.gated.size());
}

// Orders the slice's choices that belong to this rank's experts.
void Experts::order_own(const Op& op, Division& division, int num_rows) {
  const ExpertLayer& layer = *op.experts;
  const int num_chosen = layer.router.num_chosen, choices = num_rows * num_chosen;
  std::vector<int>& starts = division.starts;
  starts.assign(layer.count + 1, 0);
  const auto is_own = [&](int expert) { return expert >= layer.first && expert < layer.first + layer.count; };
  for (int i = 0; i < choices; i++)
    if (is_own(chosen_[i])) starts[chosen_[i] - layer.first + 1]++;
  for (int e = 0; e < layer.count; e++) starts[e + 1] += starts[e];
  division.rows.resize(starts[layer.count]);
  next_.assign(starts.begin(), starts.end() - 1);
  if (layer.scales_inputs) division.factors.resize(starts[layer.count]);
  for (int i = 0; i < choices; i++) {
    places_[i] = is_own(chosen_[i]) ? next_[chosen_[i] - layer.first]++ : -1;
    if (places_[i] < 0) continue;
    division.rows[places_[i]] = i / num_chosen;
    if (!layer.scales_inputs) continue;
    division.factors[places_[i]] = weights_[i];
    weights_[i] = 1.0f;
  }
}

// The format of a message: a row, then the numbers of the experts that it chose, as numbered by the receiver, or -1,
// and, with `scales_inputs`, their factors.
size_t Experts::message_bytes(const Op& op) const {
  const ExpertLayer& layer = *op.experts;
  const size_t choice_bytes = sizeof(int32_t) + (layer.scales_inputs ? sizeof(float) : 0);
  const size_t bytes = activation_row_bytes(op.input_kind, layer.size) + layer.router.num_chosen * choice_bytes;
  return (bytes + 15) / 16 * 16;
}

// Sends the slice's rows to the ranks that have their experts, each row once per rank, and orders the received choices
// by expert. The ranks of a replica have the same rows, and each sends a part of them.
void Experts::dispatch(const Op& op, Division& division, const Rows& rows, int num_rows) {
  const int rank = ranks_.are_several() ? ranks_.rank() : 0, num_ranks = ranks_.are_several() ? ranks_.num_ranks() : 1;
  const int begin = num_rows * rank / num_ranks, end = num_rows * (rank + 1) / num_ranks;
  write_messages(op, rows, num_rows, begin, end);
  received_rows_.assign(exchange_->num_ranks, 0);
  received_ = exchange_->dispatch(sent_.bytes(), message_bytes(op), sent_rows_.data(), received_rows_.data());
  if (!received_) {
    have_failed_ = true;
    std::fill(received_rows_.begin(), received_rows_.end(), 0);
  }
  order_received(op, division);
}

// Writes the messages for rows [begin, end), ordered by receiver, and records where the outputs of their choices will
// be. A rank sends outputs back in the order of its messages and their choices.
void Experts::write_messages(const Op& op, const Rows& rows, int num_rows, int begin, int end) {
  const ExpertLayer& layer = *op.experts;
  const int num_chosen = layer.router.num_chosen, num_experts = layer.router.num_computed(),
            peers = exchange_->num_ranks;
  const auto first_expert = [&](int peer) { return int(int64_t(peer) * num_experts / peers); };
  owners_.resize(num_experts);
  for (int peer = 0; peer < peers; peer++)
    std::fill(owners_.begin() + first_expert(peer), owners_.begin() + first_expert(peer + 1), peer);
  sent_rows_.assign(peers, 0);
  expected_.assign(peers, 0);
  last_row_.assign(peers, -1);
  for (int i = begin * num_chosen; i < end * num_chosen; i++) {
    if (chosen_[i] >= num_experts) continue;
    const int peer = owners_[chosen_[i]], row = i / num_chosen;
    sent_rows_[peer] += last_row_[peer] != row;
    last_row_[peer] = row;
    expected_[peer]++;
  }
  next_.assign(2 * peers, 0);
  int *const next_message = next_.data(), *const next_output = next_.data() + peers;
  for (int peer = 1; peer < peers; peer++) {
    next_message[peer] = next_message[peer - 1] + int(sent_rows_[peer - 1]);
    next_output[peer] = next_output[peer - 1] + int(expected_[peer - 1]);
  }
  const size_t row_bytes = activation_row_bytes(op.input_kind, layer.size), bytes = message_bytes(op);
  const int all_messages = peers ? next_message[peers - 1] + int(sent_rows_[peers - 1]) : 0;
  sent_.reserve(size_t(all_messages) * bytes);
  std::fill_n(places_.begin(), size_t(num_rows) * num_chosen, -1);
  last_row_.assign(peers, -1);
  for (int i = begin * num_chosen; i < end * num_chosen; i++) {
    if (chosen_[i] >= num_experts) continue;
    const int peer = owners_[chosen_[i]], row = i / num_chosen;
    if (last_row_[peer] != row) {
      last_row_[peer] = row;
      uint8_t* message = sent_.bytes() + size_t(next_message[peer]++) * bytes;
      std::memcpy(message, rows.activations(0, row, row_bytes), row_bytes);
      // The bytes of -1 are all the same, and factors without an expert are never read.
      std::memset(message + row_bytes, -1, bytes - row_bytes);
    }
    uint8_t* const choices = sent_.bytes() + size_t(next_message[peer] - 1) * bytes + row_bytes;
    const int32_t expert = chosen_[i] - first_expert(peer);
    std::memcpy(choices + i % num_chosen * sizeof(expert), &expert, sizeof(expert));
    places_[i] = next_output[peer]++;
    if (!layer.scales_inputs) continue;
    std::memcpy(choices + (num_chosen + i % num_chosen) * sizeof(float), &weights_[i], sizeof(float));
    weights_[i] = 1.0f;
  }
}

// Orders the choices of the received rows by expert.
void Experts::order_received(const Op& op, Division& division) {
  const ExpertLayer& layer = *op.experts;
  const int num_chosen = layer.router.num_chosen;
  const size_t row_bytes = activation_row_bytes(op.input_kind, layer.size), bytes = message_bytes(op);
  const auto for_choices = [&](auto&& use) {
    int message = 0;
    for (size_t peer = 0; peer < received_rows_.size(); peer++)
      for (int64_t r = 0; r < received_rows_[peer]; r++, message++) {
        const uint8_t* choices = received_ + size_t(message) * bytes + row_bytes;
        for (int j = 0; j < num_chosen; j++) {
          int32_t expert;
          std::memcpy(&expert, choices + j * sizeof(expert), sizeof(expert));
          if (expert >= 0 && expert < layer.count)
            use(peer, message, expert, choices + (num_chosen + j) * sizeof(float));
        }
      }
  };
  std::vector<int>& starts = division.starts;
  starts.assign(layer.count + 1, 0);
  returned_.assign(received_rows_.size(), 0);
  for_choices([&](size_t peer, int, int expert, const uint8_t*) {
    starts[expert + 1]++;
    returned_[peer]++;
  });
  for (int e = 0; e < layer.count; e++) starts[e + 1] += starts[e];
  const int choices = starts[layer.count];
  next_.assign(starts.begin(), starts.end() - 1);
  division.rows.resize(choices);
  division.outputs.resize(choices);
  if (layer.scales_inputs) division.factors.resize(choices);
  int output = 0;
  for_choices([&](size_t, int message, int expert, const uint8_t* factor) {
    const int place = next_[expert]++;
    division.rows[place] = message;
    division.outputs[place] = output++;
    if (layer.scales_inputs) std::memcpy(&division.factors[place], factor, sizeof(float));
  });
  activations_.reserve(choices * (sizeof(float) * most_elements_ + 64));
  outputs_.reserve(choices * sizeof(float) * largest_output_);
}

void Experts::begin_combine(const Op& op) {
  if (!exchange_) return;
  own_outputs_ = reinterpret_cast<const float*>(
      exchange_->collect(outputs_.bytes(), sizeof(float) * largest_output_, returned_.data(), expected_.data()));
  if (own_outputs_) return;
  have_failed_ = true;
  std::fill(places_.begin(), places_.end(), -1);
}

// Divides the columns of the experts that have rows into tiles.
void Experts::divide(const PackedWeight* weights, const Division& division, std::vector<ExpertTile>& tiles) const {
  const std::vector<int>& starts = division.starts;
  const int count = int(starts.size()) - 1, choices = starts[count];
  int used = 0;
  for (int e = 0; e < count; e++) used += starts[e + 1] > starts[e];
  tiles.clear();
  if (!used) return;
  const int tiles_per_thread = choices < kManyChoices ? kTilesPerThread : 2 * kTilesPerThread;
  const int at_least = (tiles_per_thread * num_threads_ + used - 1) / used;
  for (int e = 0; e < count; e++) {
    const int num_rows = starts[e + 1] - starts[e], blocks = (num_rows + kRowBlock - 1) / kRowBlock;
    if (!blocks) continue;
    const int columns = column_tiles(weights[e], (at_least + blocks - 1) / blocks, (num_rows + blocks - 1) / blocks);
    for (int i = 0; i < columns; i++) {
      const int begin = column_bound(weights[e], i, columns), end = column_bound(weights[e], i + 1, columns);
      for (int block = 0; block < blocks && begin < end; block++) {
        const int first = num_rows * block / blocks;
        tiles.push_back({e, starts[e] + first, num_rows * (block + 1) / blocks - first, begin, end});
      }
    }
  }
}

// Threads usually take tiles in turn: those of the first products, of the second ones, and then of the operations that
// follow.
const uint8_t* Experts::weights_after(const Op& op, const Tile& tile) const {
  const ExpertLayer& layer = *op.experts;
  const Division& division = division_of(op);
  size_t index = tile.index + num_threads_;
  if (op.kind == OpKind::gated_experts) {
    if (index < division.gated.size()) {
      const ExpertTile& next = division.gated[index];
      return weights_at(layer.gate[next.expert], next.begin);
    }
    index -= division.gated.size();
  }
  if (index < division.output.size()) {
    const ExpertTile& next = division.output[index];
    return weights_at(layer.down[next.expert], next.begin);
  }
  return products_.weights_from(&op + 1, int(index - division.output.size()));
}

const uint8_t* Experts::input_of(const Op& op, int index, const Rows& rows) const {
  if (exchange_) return received_ + size_t(index) * message_bytes(op);
  return rows.activations(0, index, activation_row_bytes(op.input_kind, op.experts->size));
}

// Returns the activations of a tile's rows, one after the other.
const uint8_t* Experts::gathered_rows(const Op& op, const ExpertTile& at, const Rows& rows, Scratch& scratch) const {
  const int* of_choices = division_of(op).rows.data() + at.first;
  const size_t row_bytes = activation_row_bytes(op.input_kind, op.experts->size);
  // Rows are in ascending order. An expert has a row twice if the token's experts are given and not all different.
  int num_consecutive = 1;
  while (num_consecutive < at.num_rows && of_choices[num_consecutive] == of_choices[0] + num_consecutive)
    num_consecutive++;
  if (!exchange_ && num_consecutive == at.num_rows) return input_of(op, of_choices[0], rows);
  // A thread usually computes several tiles of the same rows one after the other.
  const int64_t serial = division_of(op).serial + at.first;
  if (scratch.gathered_serial == serial) return scratch.gathered.bytes();
  scratch.gathered_serial = serial;
  scratch.gathered.reserve(kRowBlock * row_bytes);
  for (int i = 0; i < at.num_rows; i++)
    std::memcpy(scratch.gathered.bytes() + i * row_bytes, input_of(op, of_choices[i], rows), row_bytes);
  return scratch.gathered.bytes();
}

uint8_t* Experts::activations_of(const Op& op, ActivationKind kind, int first) const {
  return activations_.bytes() + size_t(first) * activation_row_bytes(kind, most_elements(*op.experts));
}

void Experts::run_gated(const Op& op, Tile& tile, const Rows& rows, Scratch& scratch) const {
  const ExpertLayer& layer = *op.experts;
  const ExpertTile& at = division_of(op).gated[tile.index];
  const PackedWeight& gate = layer.gate[at.expert];
  const size_t biases = size_t(at.expert) * gate.n;
  const GatedWeights weights = {&gate,
                                layer.up ? &layer.up[at.expert] : nullptr,
                                layer.gate_biases ? layer.gate_biases + biases : nullptr,
                                layer.up_biases ? layer.up_biases + biases : nullptr,
                                1.0f,
                                nullptr,
                                layer.scales_inputs ? division_of(op).factors.data() + at.first : nullptr,
                                layer.gate_limit};
  scratch.readahead.next_weights = weights_after(op, tile);
  const uint8_t* x = gathered_rows(op, at, rows, scratch);
  float* elements = products_.gated_sums(weights, op.input_kind, x, at.num_rows, at.begin, at.end, scratch,
                                         changes(op, at, layer.gated_adapters));
  scratch.readahead.next_weights = nullptr;
  if (!tile.commit()) return;
  const int size = at.end - at.begin;
  const size_t row_bytes = activation_row_bytes(op.activation_kind, gate.n);
  uint8_t* out = activations_of(op, op.activation_kind, at.first) + activation_offset(op.activation_kind, at.begin);
  for (int r = 0; r < at.num_rows; r++, elements += size, out += row_bytes)
    quantize_rows(op.activation_kind, elements, size, 1, size, out);
}

void Experts::run_output(const Op& op, Tile& tile, Scratch& scratch) const {
  const ExpertLayer& layer = *op.experts;
  const ExpertTile& at = division_of(op).output[tile.index];
  const PackedWeight& weight = layer.down[at.expert];
  const float* bias = layer.down_biases ? layer.down_biases + size_t(at.expert) * weight.n : nullptr;
  const uint8_t* x = activations_of(op, op.input_kind, at.first);
  scratch.readahead.next_weights = weights_after(op, tile);
  const float* sums = products_.sums(weight, bias, op.input_kind, x, at.num_rows, at.begin, at.end, scratch,
                                     changes(op, at, layer.output_adapters));
  scratch.readahead.next_weights = nullptr;
  if (!tile.commit()) return;
  const int size = at.end - at.begin;
  const int* indices = exchange_ ? division_of(op).outputs.data() : nullptr;
  for (int r = at.first; r < at.first + at.num_rows; r++, sums += size)
    std::copy_n(sums, size, output_of(indices ? indices[r] : r) + at.begin);
}

void Experts::combine(const Op& op, const Rows& rows, int row) const {
  const ExpertLayer& layer = *op.experts;
  const int size = layer.size, num_chosen = layer.router.num_chosen;
  const bool is_own_part = op.target == LinearTarget::part && !layer.adds_block;
  float* sum = is_own_part                           ? ranks_.own_part(row)
               : op.target == LinearTarget::qkv      ? rows.qkv(row)
               : op.target == LinearTarget::shortcut ? rows.shortcut(row)
                                                     : rows.block(row);
  if (!layer.adds_block)
    std::fill_n(sum, size, 0.0f);
  else if (layer.has_shared_gate)
    model_.rows.scale(sum, shared_factor(layer.router, rows.router_logits(row)), size);
  float identity = 0.0f;
  for (size_t i = size_t(row) * num_chosen; i < size_t(row + 1) * num_chosen; i++)
    if (chosen_[i] >= layer.router.num_computed()) {
      identity += weights_[i];
    } else if (places_[i] >= 0) {
      const float* output = own_outputs_ + size_t(places_[i]) * largest_output_;
      if (op.vectors[0]) {
        float* const normed = rows.normed(row);
        model_.rows.multiply(output, op.vectors[0], size, normed);
        model_.rows.rms_norm(normed, nullptr, op.eps, size, normed);
        output = normed;
      }
      model_.rows.add_scaled(sum, output, weights_[i], size);
    }
  // One rank adds the inputs, which all ranks have.
  if (identity != 0.0f && (!ranks_.are_several() || ranks_.rank() == 0)) {
    const float* input = rows.residual(row);
    if (op.vectors[1]) {
      model_.norm(op.vectors[1], op.vectors[2], op.eps, input, rows.normed(row));
      input = rows.normed(row);
    }
    model_.rows.add_scaled(sum, input, identity, size);
  }
  if (op.target == LinearTarget::residual)
    model_.rows.add_scaled(rows.residual(row), sum, op.scale, size);
  else if (op.target == LinearTarget::part && !is_own_part)
    std::copy_n(sum, size, ranks_.own_part(row));
}

}  // namespace engine
