// Mixtures of experts: which tokens of the slice each expert has, and its products with them.
//
// The choices of a slice's tokens are ordered by expert, so that the weights of an expert are read once for all its
// tokens. Threads divide tiles of columns of all experts. A token adds up its experts' outputs in the order in which it
// chose them, so its result does not depend on the other tokens.
//
// If the ranks of several replicas divide the experts, a rank sends each row to the ranks that have its experts,
// computes the rows that it received, and sends their outputs back.
#pragma once

#include <cstdint>
#include <vector>

#include "model/expert_exchange.h"
#include "model/model.h"
#include "phases/products.h"
#include "model/ranks.h"
#include "model/rows.h"
#include "phases/scratch.h"
#include "runtime/buffer.h"
#include "runtime/threads.h"

namespace engine {

class Experts {
 public:
  Experts(const Model& model, const Ranks& ranks, const Products& products, int num_threads)
      : model_(model), ranks_(ranks), products_(products), num_threads_(num_threads) {}

  void add_op(const Op& op);
  // Returns whether any layer has experts.
  bool are_any() const { return most_chosen_ > 0; }
  void reserve(int rows);
  // From now on, divides the experts among the ranks of several replicas.
  void join(const ExpertExchange& exchange) { exchange_ = &exchange; }
  bool are_exchanged() const { return exchange_ != nullptr; }
  // Returns whether a rank is lost. The program must then return immediately, because other ranks may wait for this
  // process to exit.
  bool have_failed() const { return have_failed_; }

  // Chooses the experts of a row, perhaps by the token, whose digits are `inputs`.
  void route(const Op& op, const Rows& rows, int row, const float* inputs);
  // Orders the choices of `rows` rows by expert, and divides the layer's products into tiles. Returns the number of
  // tiles of the first products, which may be 0 if all chosen experts are on other ranks.
  int begin_gated(const Op& op, const Rows& rows, int num_rows);
  int begin_output(const Op& op) const { return int(division_of(op).output.size()); }
  void run_gated(const Op& op, Tile& tile, const Rows& rows, Scratch& scratch) const;
  void run_output(const Op& op, Tile& tile, Scratch& scratch) const;
  // Receives the outputs that other ranks computed.
  void begin_combine(const Op& op);
  // Adds up the outputs of a row's experts.
  void combine(const Op& op, const Rows& rows, int row) const;

 private:
  // Choices [first, first + num_rows) in their order by expert, and columns of a matrix of that expert.
  struct ExpertTile {
    int expert, first, num_rows, begin, end;
  };
  // The division of a layer's choices of experts among tiles. It must not change until the layer begins again, because
  // a slow thread may still read it for a tile that another thread has already computed.
  struct Division {
    int64_t serial;              // the number of its first choice, which differs between divisions
    std::vector<int> starts;     // the first choice of each expert, and the end of the last one's
    std::vector<int> rows;       // the row of each choice, in the slice or among the received rows
    std::vector<int> outputs;    // for each choice of a received row, its place in the order of rows and their choices
    std::vector<float> factors;  // factors on the input of each choice, if weights multiply inputs
    std::vector<ExpertTile> gated, output;
  };

  const Division& division_of(const Op& op) const { return divisions_[op.layer]; }
  void divide(const PackedWeight* weights, const Division& division, std::vector<ExpertTile>& tiles) const;
  const uint8_t* weights_after(const Op& op, const Tile& tile) const;
  void order_own(const Op& op, Division& division, int num_rows);
  void dispatch(const Op& op, Division& division, const Rows& rows, int num_rows);
  void write_messages(const Op& op, const Rows& rows, int num_rows, int begin, int end);
  void order_received(const Op& op, Division& division);
  const uint8_t* input_of(const Op& op, int index, const Rows& rows) const;
  const uint8_t* gathered_rows(const Op& op, const ExpertTile& at, const Rows& rows, Scratch& scratch) const;
  size_t message_bytes(const Op& op) const;
  // Returns the adapters' changes to a product of a tile, given the adapters of the layer's experts.
  RowChanges changes(const Op& op, const ExpertTile& at, const Adapter* const* adapters) const {
    return {adapters ? adapters[at.expert] : nullptr, division_of(op).rows.data() + at.first};
  }
  // Returns the place of the activations of a tile, which begins with choice `first`. There is space for rows of the
  // layer's largest expert.
  uint8_t* activations_of(const Op& op, ActivationKind kind, int first) const;
  float* output_of(int index) const { return outputs_.floats() + size_t(index) * largest_output_; }

  const Model& model_;
  const Ranks& ranks_;
  const Products& products_;
  const int num_threads_;
  int most_chosen_ = 0, most_elements_ = 0, largest_output_ = 0;  // maximums over all layers
  std::vector<Division> divisions_;                               // one per layer
  // For each row and choice: the expert, its weight, and the index of its output, or -1.
  std::vector<int32_t> chosen_;
  std::vector<float> weights_;
  std::vector<int> places_;
  std::vector<int> next_;  // the next free place of each expert, or of each peer
  int64_t next_serial_ = 0;
  // For the choices, ordered by expert.
  Buffer activations_, outputs_;

  const ExpertExchange* exchange_ = nullptr;
  bool have_failed_ = false;
  Buffer sent_;
  std::vector<int> owners_;    // the rank of each expert
  std::vector<int> last_row_;  // the last row with a message to each rank
  // For each rank: the messages to and from it, and the outputs for choices received from it and sent to it.
  std::vector<int64_t> sent_rows_, received_rows_, expected_, returned_;
  const uint8_t* received_ = nullptr;   // the rows received in the current layer
  const float* own_outputs_ = nullptr;  // the outputs of the choices of this rank's rows
};

}  // namespace engine
