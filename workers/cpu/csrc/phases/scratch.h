// The memory of one thread.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "phases/attend/attention_tasks.h"
#include "phases/attend/entries.h"
#include "model/rows.h"
#include "runtime/buffer.h"
#include "runtime/readahead.h"
#include "sampling/token_chooser.h"

namespace engine {

// The number of floats in a thread's buffer for the sums of a tile.
constexpr int kTileFloats = 16384;

// A thread's results stay here until it may write them, because another thread may have computed the same tile.
struct Scratch {
  Scratch(int max_rows, const Model& model)
      : attention(max_rows, model.largest_kv),
        tile(new float[std::max(2 * kTileFloats, max_rows * model.largest_kv.value_dim)]),
        chooser(model.shape.vocab_size),
        rows(model.shape) {}

  AttentionScratch attention;
  std::unique_ptr<float[]> tile;
  TokenChooser chooser;
  Buffer results;     // the results of a tile's attention tasks
  Buffer mixing;      // the intermediate results of a recurrent layer's tile
  Buffer low_rank;    // the products with an expert's first factors, by which adapters' second factors are multiplied
  CopiedKeys copied;  // the entries to which tokens attend, or their index keys
  Buffer gathered;    // the activations of rows that an expert has
  int64_t gathered_serial = -1;  // the number of these rows
  Rows rows;                     // the results of a piece's rows
  std::vector<AttentionTasks::Task> tasks;
  std::vector<AttentionTask> kernel_tasks;
  Readahead readahead;
  std::vector<Run> factors;  // the factors that the readahead of a product fetches
};

}  // namespace engine
