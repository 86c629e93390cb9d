#include "phases/attend/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace engine {

namespace {

constexpr float kLog2E = 1.44269504f;

}  // namespace

void Attention::add_op(const Op& op) {
  recorded_ops_.emplace_back();
  if (op.kind != OpKind::store_index && op.kind != OpKind::rotate_store && op.kind != OpKind::store_entries &&
      op.kind != OpKind::choose_keys && op.kind != OpKind::attention)
    return;
  auto queries = std::find_if(queries_.begin(), queries_.end(), [&](const Queries& each) {
    return each.num_heads == op.num_heads && each.num_kv_heads == op.num_kv_heads && each.head_dim == op.head_dim;
  });
  if (queries == queries_.end()) {
    queries_.emplace_back();
    queries = queries_.end() - 1;
    queries->num_heads = op.num_heads;
    queries->num_kv_heads = op.num_kv_heads;
    queries->head_dim = op.head_dim;
  }
  const KVLayout kv = model_.kv(op);
  recorded_ops_.back() = {kv, model_.heads_per_kv_head(op), size_t(model_.attention.query_words(kv)), &*queries,
                          nullptr};
}

void Attention::reserve(int rows) {
  for (Queries& each : queries_)
    each.buffer.reserve(sizeof(uint32_t) * rows * each.num_heads *
                        model_.attention.query_words(model_.kv_layout(each.num_kv_heads, each.head_dim)));
}

void Attention::rotate_store(const Op& op, float* qkv, int row) {
  if (op.latent) return rotate_store_latent(op, qkv, row);
  if (model_.shape.is_compressed) return rotate_store_compressed(op, qkv, row);
  const int num_heads = op.num_heads, head_dim = op.head_dim;
  const int num_kv_heads = op.num_stored ? op.num_kv_heads : 0;
  if (op.reads_source) {
    // num_columns is the layer's index among those that read a source.
    const size_t size = size_t(num_heads) * head_dim, token = slice_.first_token + row;
    heads_.norm_queries_and_keys(op, qkv, row);
    if (float* const out = slice_.step.source_queries)
      std::copy_n(qkv, size, out + (size_t(op.num_columns) * slice_.step.num_tokens + token) * size);
    return store_queries(op, row, qkv);
  }
  const float* keys = qkv + num_heads * head_dim;
  const float* values = heads_.place_values(op, qkv);
  if (!op.rotates_before_norm) heads_.norm_queries_and_keys(op, qkv, row);
  if (op.scale != 0.0f)
    for (int i = 0; i < (num_heads + 2 * num_kv_heads) * head_dim; i++)
      qkv[i] = std::clamp(qkv[i], -op.scale, op.scale);
  if (op.rope >= 0) {
    const RotaryTables::Angles angles = ropes_.angles(op.rope, row);
    model_.rows.rotate(qkv, num_heads + num_kv_heads, head_dim, angles.cosines, angles.sines, angles.half);
  }
  if (op.rotates_before_norm) heads_.norm_queries_and_keys(op, qkv, row);
  heads_.scale_queries(op, qkv, num_heads * head_dim, row);
  if (const RelativeBiases* const relative = op.relative_biases) {
    float* const factors = qkv + relative->first_column;
    if (relative->bound) heads_.limit_norms(factors, num_heads, relative->rank, relative->scales, relative->bound);
    heads_.scale_queries(op, factors, num_heads * relative->rank, row);
  }
  // The cache stores only finite numbers. So a token whose key or value is not finite gets NaN queries, and its own
  // result shows the failure.
  if (!model_.rows.all_finite(qkv, (num_heads + 2 * num_kv_heads) * head_dim))
    std::fill_n(qkv, num_heads * head_dim, std::nanf(""));
  store(op, row, qkv, keys, values);
}

void Attention::load_key(const Op& op, float* qkv, int row) const {
  const KVLayout kv = model_.kv(op);
  const int slot = slice_.step.groups[op.group].slot_mapping[slice_.first_token + row];
  model_.attention.load(kv, slice_.step.kv_caches[op.layer], slot / kv.block_size, slot % kv.block_size, 0, op.head_dim,
                        qkv);
}

// The key's latent vector has a norm. The rotated parts of queries are stored next to the plain ones, so move them
// after the products of the plain ones.
void Attention::rotate_store_latent(const Op& op, float* qkv, int row) {
  const LatentShape& latent = *op.latent;
  const int num_heads = latent.num_heads, head_dim = latent.key_dim, rank = latent.kv_rank;
  const int index_dim = latent.index_dim;
  float* const products = qkv + latent.product_offset();
  const int rotary_dim = op.num_columns, plain_dim = latent.query_dim() - rotary_dim;
  const bool has_own_key = op.vectors[0] != nullptr;
  if (has_own_key) {
    model_.rows.rms_norm(qkv, op.vectors[0], op.eps, rank, qkv);
    if (latent.norms_rotated_key)
      model_.rows.rms_norm(qkv + rank, op.vectors[0] + rank, op.eps, rotary_dim, qkv + rank);
    std::fill(qkv + rank + rotary_dim, qkv + head_dim, 0.0f);
  }
  float *const index_key = qkv + head_dim, *const index_queries = qkv + latent.index_offset() + latent.index_heads;
  if (const float* norm = op.vectors[1])
    model_.rows.layer_norm(index_key, norm, norm + index_dim, model_.shape.index_eps, index_dim, index_key);
  else
    std::fill_n(index_key, index_dim + latent.index_inputs, 0.0f);
  const float* rotated = qkv + latent.query_offset() + plain_dim;
  for (int h = 0; h < num_heads; h++, rotated += latent.query_dim()) {
    float* const query = products + h * head_dim;
    std::fill(std::copy_n(rotated, rotary_dim, query + rank), query + head_dim, 0.0f);
  }
  if (op.rope >= 0) {
    const RotaryTables::Angles angles = ropes_.angles(op.rope, row);
    if (has_own_key) model_.rows.rotate(qkv + rank, 1, head_dim, angles.cosines, angles.sines, angles.half);
    model_.rows.rotate(products + rank, num_heads, head_dim, angles.cosines, angles.sines, angles.half);
    if (op.vectors[1]) {
      model_.rows.rotate(index_key, 1, index_dim, angles.cosines, angles.sines, angles.half);
      model_.rows.rotate(index_queries, latent.index_heads, index_dim, angles.cosines, angles.sines, angles.half);
    }
  }
  heads_.scale_queries(op, products, num_heads * head_dim, row);
  if (op.num_stored && !model_.rows.all_finite(qkv, latent.query_offset()))
    std::fill_n(products, num_heads * head_dim, std::nanf(""));
  store(op, row, products, qkv, nullptr);
}

// The norm of queries has no weights.
void Attention::rotate_store_compressed(const Op& op, float* qkv, int row) {
  const int num_heads = op.num_heads, head_dim = op.head_dim;
  float* const key = qkv + num_heads * head_dim;
  heads_.norm_queries_and_keys(op, qkv, row);
  const RotaryTables::Angles angles = ropes_.angles(op.rope, row);
  rotate_neighbors(angles, qkv, num_heads + 1, head_dim, 1.0f);
  float* const inputs = qkv + op.first_column;
  if (const Compression* const entries = op.compression) {
    float* const index_queries = inputs + op.num_columns + entries->index_heads;
    rotate_neighbors(angles, index_queries, entries->index_heads, entries->index_dim, 1.0f);
  }
  if (!model_.rows.all_finite(key, head_dim) || !model_.rows.all_finite(inputs, op.num_columns))
    std::fill_n(qkv, num_heads * head_dim, std::nanf(""));
  store(op, row, qkv, key, nullptr);
  if (op.num_columns) entries_.store_inputs(op, row, inputs);
}

void Attention::store_queries(const Op& op, int row, const float* query_heads) {
  const KVLayout& kv = recorded(op).kv;
  const int heads = recorded(op).heads;
  for (int g = 0; g < kv.num_kv_heads; g++)
    model_.attention.convert_queries(kv, op.attention, query_heads + g * heads * kv.head_dim, heads,
                                     queries(op, g, row));
}

void Attention::store(const Op& op, int row, const float* query_heads, const float* keys, const float* values) {
  const KVLayout& kv = recorded(op).kv;
  const int head_dim = kv.head_dim;
  store_queries(op, row, query_heads);
  for (int g = 0; op.num_stored && g < kv.num_kv_heads; g++)
    store_head(op, row, g, keys + g * head_dim, kv.has_values ? values + g * head_dim : nullptr);
}

void Attention::store_head(const Op& op, int row, int kv_head, const float* key, const float* value) const {
  const KVLayout& kv = recorded(op).kv;
  const int slot = slice_.step.groups[op.group].slot_mapping[slice_.first_token + row];
  model_.attention.store(kv, slice_.step.kv_caches[op.layer], slot / kv.block_size, slot % kv.block_size, kv_head, key,
                         value);
}

uint32_t* Attention::queries(const Op& op, int kv_head, int row) const {
  const RecordedOp& own = recorded(op);
  const size_t words = own.heads * own.query_words;
  return reinterpret_cast<uint32_t*>(own.queries->buffer.bytes()) + (size_t(kv_head) * slice_.num_tokens + row) * words;
}

int Attention::begin(const Op& op) {
  const AttentionTasks::List& list = tasks_.of_keys(AttentionTasks::Keys(op));
  recorded_ops_[model_.index_of(op)].list = &list;
  if (list.num_slots) {
    partial_.reserve(list.num_slots * partial_floats(op) * sizeof(float));
    if (size_t(list.num_slots) > num_finished_slots_) {
      num_finished_slots_ = list.num_slots;
      finished_slots_.reset(new std::atomic<int>[num_finished_slots_]);
    }
    for (int i = 0; i < list.num_slots; i++) finished_slots_[i].store(0);
  }
  return int(list.first_tasks.size()) - 1;
}

int Attention::output_dim(const Op& op) const { return op.output_dim ? op.output_dim : recorded(op).kv.value_dim; }

size_t Attention::partial_floats(const Op& op) const {
  return size_t(recorded(op).heads) * (recorded(op).kv.padded_value_dim() + 32);
}

AttentionState Attention::partial_state(const Op& op, float* floats) const {
  const int rows = recorded(op).heads;
  return {floats, floats + 16 * rows, floats + 32 * rows};
}

AttentionTask Attention::kernel_task(const Op& op, const Task& task) const {
  const StepGroup& group = slice_.step.groups[op.group];
  return {
      queries(op, task.kv_head, task.token),
      slice_.step.positions[slice_.first_token + task.token],
      task.num_tokens,
      tasks_.num_keys(AttentionTasks::Keys(op), task.sequence),
      op.reads_source ? nullptr : slice_.visible(slice_.first_token + task.token, op.attention.window),
      recorded(op).heads,
      task.kv_head,
      task.first_partition,
      task.last_partition,
      group.block_table + slice_.table_row(task.sequence) * group.block_table_stride,
      slice_.step.kv_caches[op.layer],
      nullptr,
      nullptr,
      {op.vectors[1], op.num_columns},
      {},
      op.is_sparse && !op.compression ? choice_.of(task.kv_head, task.token) : nullptr,
      choice_.stride(),
  };
}

void Attention::choose(const Op& op, Tile& tile, const Rows& rows, Scratch& scratch) {
  const int row = choice_.row_of(tile);
  Task task{};
  task.sequence = slice_.sequence_of(row);
  task.token = row;
  task.num_tokens = 1;
  choice_.run(op, tile, kernel_task(op, task), task.sequence, rows, scratch);
}

AttentionTask Attention::task_of_rows(const Op& op, const Task& task, const Rows& rows) const {
  AttentionTask result = kernel_task(op, task);
  if (const RelativeBiases* const biases = op.relative_biases)
    result.query_biases = {rows.qkv(task.token) + biases->first_column, rows.qkv_stride(), biases->table, biases->rank,
                           biases->num_distances};
  return result;
}

// Results (activations, or the state of a partition) stay in the thread's memory until the tile is committed.
void Attention::run(const Op& op, Tile& tile, const Rows& rows, Scratch& scratch) {
  const AttentionTasks::List& list = *recorded(op).list;
  const int begin = list.first_tasks[tile.index], count = list.first_tasks[tile.index + 1] - begin;
  AttentionTask tasks[AttentionTasks::kMaxTasksOfTile];
  uint8_t* results[AttentionTasks::kMaxTasksOfTile];
  size_t bytes = 0;
  for (int i = 0; i < count; i++) {
    tasks[i] = task_of_rows(op, list.tasks[begin + i], rows);
    tasks[i].copied_values = scratch.attention.copied_values;
    if (i) tasks[i - 1].next = &tasks[i];
    bytes += result_bytes(op, list.tasks[begin + i]);
  }
  scratch.results.reserve(bytes);
  model_.attention.fetch(recorded(op).kv, op.attention, tasks[0]);
  uint8_t* result = scratch.results.bytes();
  for (int i = 0; i < count; i++) {
    results[i] = result;
    attend(op, list.tasks[begin + i], tasks[i], rows, scratch, result);
    result += result_bytes(op, list.tasks[begin + i]);
  }
  if (!tile.commit()) return;
  for (int i = 0; i < count; i++) write(op, list.tasks[begin + i], rows, results[i], scratch);
}

size_t Attention::result_bytes(const Op& op, const Task& task) const {
  if (task.num_slots > 1) return partial_floats(op) * sizeof(float);
  const int columns = recorded(op).heads * output_dim(op);
  return (task.num_tokens * activation_row_bytes(op.activation_kind, columns) + 63) / 64 * 64;
}

void Attention::attend(const Op& op, const Task& task, const AttentionTask& kernel_task, const Rows& rows,
                       Scratch& scratch, uint8_t* result) const {
  const KVLayout& kv = recorded(op).kv;
  if (task.num_slots > 1)
    return model_.attention.attend(kv, op.attention, kernel_task, scratch.attention,
                                   partial_state(op, reinterpret_cast<float*>(result)));
  model_.attention.attend(kv, op.attention, kernel_task, scratch.attention, scratch.attention.total);
  finish(op, task, scratch.attention.total, rows, scratch, result);
}

// Tokens for which all entries are chosen share the copies.
void Attention::add_entries(const Op& op, const Task& task, const AttentionState& total, Scratch& scratch) const {
  CopiedKeys& copied = scratch.copied;
  const int position = slice_.step.positions[slice_.first_token + task.token];
  const auto count_of = [&](int token) { return (position + token + 1) / op.compression->rate; };
  const auto chooses = [&](int token) { return op.is_sparse && count_of(token) > op.choice.num_chosen; };
  for (int token = 0, end; token < task.num_tokens; token = end) {
    copied.numbers.clear();
    copied.visible.clear();
    end = token + 1;
    if (chooses(token)) {
      const uint64_t* const chosen = choice_.of(0, task.token + token);
      for (int number = 0; number < count_of(token); number++)
        if (chosen[number / kChunk] >> number % kChunk & 1) copied.numbers.push_back(number);
      copied.visible = {0, int32_t(copied.numbers.size())};
    } else {
      while (end < task.num_tokens && !chooses(end)) end++;
      for (int number = 0; number < count_of(end - 1); number++) copied.numbers.push_back(number);
      for (int each = token; each < end; each++) copied.visible.insert(copied.visible.end(), {0, count_of(each)});
    }
    if (copied.numbers.empty()) continue;
    entries_.copy(op, task.sequence, false, copied);
    attend_copied(op, task, token, end, total, scratch);
  }
}

void Attention::attend_copied(const Op& op, const Task& task, int first, int end, const AttentionState& total,
                              Scratch& scratch) const {
  const KVLayout layout = entries_.copied_layout(op, false);
  const CopiedKeys& copied = scratch.copied;
  const int heads = recorded(op).heads, row = first * heads, padded = layout.padded_value_dim();
  AttentionTask copies{};
  copies.queries = queries(op, task.kv_head, task.token + first);
  copies.num_tokens = end - first;
  copies.visible = copied.visible.data();
  copies.num_heads = heads;
  copies.blocks = copied.blocks.data();
  copies.kv_cache = copied.keys.bytes();
  copies.copied_values = scratch.attention.copied_values;
  const AttentionState of_tokens = {total.maximum + row, total.sum + row * kSumParts, total.values + row * padded};
  for (int partition = 0; partition * kPartition < int(copied.numbers.size()); partition++) {
    copies.first_partition = copies.last_partition = partition;
    model_.attention.attend(layout, {op.attention.scale, op.attention.softcap, 0}, copies, scratch.attention,
                            scratch.attention.part);
    model_.attention.combine(of_tokens, scratch.attention.part, copies.num_tokens * heads, padded);
  }
}

// Writes the activations of a task's tokens, given the state over all their keys but entries.
void Attention::finish(const Op& op, const Task& task, const AttentionState& total, const Rows& rows, Scratch& scratch,
                       uint8_t* activations) const {
  const int value_dim = recorded(op).kv.value_dim, dim = output_dim(op);
  const int heads = recorded(op).heads, columns = heads * dim;
  float* out = scratch.tile.get();
  if (op.compression) add_entries(op, task, total, scratch);
  if (const float* sinks = op.vectors[0]) {
    // A sink is a score without a value. Here it is in base 2, like the maximums.
    const float* own = sinks + task.kv_head * heads;
    for (int r = 0; r < task.num_tokens * heads; r++)
      total.sum[r * kSumParts] += std::exp2(own[r % heads] - total.maximum[r]);
  }
  if (op.relative_biases && op.relative_biases->first_sink)
    for (int r = 0; r < task.num_tokens * heads; r++) {
      const float* const own = rows.qkv(task.token + r / heads) + op.relative_biases->first_sink;
      total.sum[r * kSumParts] += std::exp2(own[task.kv_head * heads + r % heads] * kLog2E - total.maximum[r]);
    }
  model_.attention.finish(total, task.num_tokens * heads, value_dim, out);
  for (int r = 1; dim < value_dim && r < task.num_tokens * heads; r++)
    std::memmove(out + r * dim, out + r * value_dim, dim * sizeof(float));
  const size_t row_bytes = activation_row_bytes(op.activation_kind, columns);
  for (int t = 0; t < task.num_tokens; t++, out += columns, activations += row_bytes) {
    if (model_.shape.is_compressed) rotate_neighbors(ropes_.angles(op.rope, task.token + t), out, heads, dim, -1.0f);
    for (int h = 0; op.norms_values && h < heads; h++)
      model_.rows.rms_norm(out + h * dim, nullptr, op.eps, dim, out + h * dim);
    if (op.first_column) {
      const float* gates = rows.qkv(task.token + t) + op.first_column + task.kv_head * columns;
      model_.rows.gate(model_.shape.output_gate, gates, out, columns, out);
    }
    quantize_rows(op.activation_kind, out, columns, 1, columns, activations);
  }
}

void Attention::write(const Op& op, const Task& task, const Rows& rows, uint8_t* result, Scratch& scratch) {
  if (task.num_slots > 1) {
    const int heads = recorded(op).heads;
    float* partials = partial_.floats() + task.first_slot * partial_floats(op);
    std::memcpy(partials + (task.slot - task.first_slot) * partial_floats(op), result,
                partial_floats(op) * sizeof(float));
    // The thread that finishes last combines the partitions, in order.
    std::atomic<int>& finished = finished_slots_[task.first_slot];
    if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < task.num_slots) return;
    const AttentionState total = partial_state(op, partials);
    for (int i = 1; i < task.num_slots; i++)
      model_.attention.combine(total, partial_state(op, partials + i * partial_floats(op)), heads,
                               recorded(op).kv.padded_value_dim());
    finish(op, task, total, rows, scratch, result);
  }
  copy(op, rows, task, result);
}

void Attention::copy(const Op& op, const Rows& rows, const Task& task, const uint8_t* result) const {
  const int dim = output_dim(op), columns = recorded(op).heads * dim;
  const size_t stride = activation_row_bytes(op.activation_kind, op.num_heads * dim);
  const size_t row_bytes = activation_row_bytes(op.activation_kind, columns);
  uint8_t* out =
      rows.activations(1, task.token, stride) + activation_offset(op.activation_kind, task.kv_head * columns);
  for (int t = 0; t < task.num_tokens; t++, out += stride, result += row_bytes)
    std::memcpy(out, result, activation_offset(op.activation_kind, columns));
}

void Attention::attend_rows(const Op& op, const Rows& rows, int end_row, Scratch& scratch) const {
  std::vector<Task>& tasks = scratch.tasks;
  std::vector<AttentionTask>& kernel_tasks = scratch.kernel_tasks;
  tasks_.find(AttentionTasks::Keys(op), rows.first, end_row, tasks);
  kernel_tasks.clear();
  for (const Task& task : tasks) {
    kernel_tasks.push_back(task_of_rows(op, task, rows));
    kernel_tasks.back().copied_values = scratch.attention.copied_values;
  }
  for (size_t i = 0; i + 1 < tasks.size(); i++) kernel_tasks[i].next = &kernel_tasks[i + 1];
  model_.attention.fetch(recorded(op).kv, op.attention, kernel_tasks[0]);
  for (size_t i = 0; i < tasks.size(); i++) {
    scratch.results.reserve(result_bytes(op, tasks[i]));
    attend(op, tasks[i], kernel_tasks[i], rows, scratch, scratch.results.bytes());
    copy(op, rows, tasks[i], scratch.results.bytes());
  }
}

}  // namespace engine
