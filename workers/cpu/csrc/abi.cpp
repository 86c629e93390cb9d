// Describes the structs, enums and functions that Python uses, one per line, with the compiler's own sizes, offsets and
// types. Python declares them from workers/cpu/abi/description.txt, and rejects a library with another text.
//
// The fields of a struct are listed in their order. The compiler rejects a list with a field too few or too many.
#include <string>
#include <type_traits>

#include "api.h"
#include "program/program.h"

namespace engine {
namespace {

template <class T>
std::string type_name() {
  const std::string bits = [] {
    if constexpr (std::is_void_v<T>)
      return std::string();
    else
      return std::to_string(8 * sizeof(T));
  }();
  if constexpr (std::is_void_v<T>)
    return "void";
  else if constexpr (std::is_array_v<T>)
    return type_name<std::remove_extent_t<T>>() + "[" + std::to_string(std::extent_v<T>) + "]";
  else if constexpr (std::is_pointer_v<T>)
    return "pointer";
  else if constexpr (std::is_enum_v<T>)
    return type_name<std::underlying_type_t<T>>();
  else if constexpr (std::is_floating_point_v<T>)
    return "float" + bits;
  else if constexpr (std::is_integral_v<T>)
    return (std::is_signed_v<T> ? "int" : "uint") + bits;
  else
    return "struct" + bits;
}

template <class Result, class... Arguments>
std::string signature(Result (*)(Arguments...)) {
  std::string arguments;
  ((arguments += (arguments.empty() ? "" : ", ") + type_name<Arguments>()), ...);
  return "(" + arguments + ") -> " + type_name<Result>();
}

// Expands to macro(name) for each of up to 85 names.
#define PARENTHESES ()
#define EXPAND(...) EXPAND_16(EXPAND_16(EXPAND_16(EXPAND_16(EXPAND_16(__VA_ARGS__)))))
#define EXPAND_16(...) EXPAND_4(EXPAND_4(EXPAND_4(EXPAND_4(__VA_ARGS__))))
#define EXPAND_4(...) EXPAND_1(EXPAND_1(EXPAND_1(EXPAND_1(__VA_ARGS__))))
#define EXPAND_1(...) __VA_ARGS__
#define FOR_EACH(macro, ...) EXPAND(FOR_EACH_STEP(macro, __VA_ARGS__))
#define FOR_EACH_STEP(macro, name, ...) macro(name) __VA_OPT__(FOR_EACH_AGAIN PARENTHESES(macro, __VA_ARGS__))
#define FOR_EACH_AGAIN() FOR_EACH_STEP

// One function and not an expression at each of some hundred fields, which took longer to compile than any kernels.
void add_field(std::string& text, const char* name, std::string (*type)(), size_t offset) {
  text += " ";
  text += name;
  text += ":" + type() + "@" + std::to_string(offset);
}

void add_value(std::string& text, const char* name, int value) {
  text += " ";
  text += name;
  text += "=" + std::to_string(value);
}

void add_function(std::string& text, const char* name, const std::string& signature) {
  text += "function ";
  text += name;
  text += " " + signature + "\n";
}

#define FIELD(name) add_field(text, #name, type_name<decltype(Mirrored::name)>, offsetof(Mirrored, name));
#define ENUMERATOR(name) add_value(text, #name, int(Mirrored::name));

// The structured binding compiles only if the number of names equals the number of fields.
#define STRUCT(Name, ...)                                                                    \
  {                                                                                          \
    using Mirrored = Name;                                                                   \
    (void)[](const Mirrored& value) { [[maybe_unused]] const auto& [__VA_ARGS__] = value; }; \
    text += "struct " #Name " size=" + std::to_string(sizeof(Mirrored));                     \
    FOR_EACH(FIELD, __VA_ARGS__)                                                             \
    text += "\n";                                                                            \
  }
#define ENUM(Name, ...)               \
  {                                   \
    using Mirrored = Name;            \
    text += "enum " #Name;            \
    FOR_EACH(ENUMERATOR, __VA_ARGS__) \
    text += "\n";                     \
  }
#define FUNCTION(name) add_function(text, #name, signature(&name));

std::string describe() {
  std::string text;
  STRUCT(PackedWeight, format, n, k, group, scale, data)
  STRUCT(LatentShape, num_heads, key_dim, query_inputs, kv_rank, plain_dim, rotary_dim, value_dim, norms_rotated_key,
         index_heads, index_dim, index_inputs, gate_dim)
  STRUCT(ModelShape, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size, block_size,
         block_bytes, kv_format, activation, output_gate, gate_cap, up_cap, norm, norm_groups, is_bidirectional,
         keeps_block, router_size, projection_size, mixed_size, num_streams, input_size, is_latent, index_dim,
         index_inputs, index_eps, is_compressed, num_threads)
  STRUCT(AttentionLayer, scale, softcap, window, rounds_alibi)
  STRUCT(Router, num_experts, num_chosen, num_identities, skips_identities, num_always, scoring, renormalizes,
         num_groups, num_chosen_groups, num_best, corrects_logits, scale, mixer_noise, softcap, correction, scales,
         experts_by_token, num_second_tokens, second_tokens, adjugate_group, adjugate_scale)
  STRUCT(GateLimit, bound, is_activated)
  STRUCT(ExpertExchange, num_ranks, begin_round, dispatch, collect)
  STRUCT(ExpertLayer, router, size, first, count, adds_block, has_shared_gate, scales_inputs, gate_limit, gate, up,
         down, gate_biases, up_biases, down_biases, gated_adapters, output_adapters)
  STRUCT(Mixer, kind, channels, num_convolved, kernel, segment, num_taps, distance, state_offset, num_heads, num_groups,
         key_dim, value_dim, step_rank, norm_groups, gates_before_norm, has_tiled_heads, gate_activation, min_step,
         max_step, strength, lowest_log_decay, taps, bias, multipliers, decay, skip, step_bias, norm, gates,
         gate_biases)
  STRUCT(LowRankFactor, data, rank, format, bias)
  STRUCT(Adapter, down, whole, up)
  STRUCT(AltUp, active, router_norm, router, predict, correct, output_scale)
  STRUCT(HyperConnection, num_factors, num_iterations, eps, output_scale, norm_eps, weight, bias, scale, norm)
  STRUCT(NgramTable, longest, num_heads, end_id, first_row, multipliers, sizes, first_rows)
  STRUCT(NormGate, rank, down, up)
  STRUCT(RelativeBiases, first_column, rank, num_distances, first_sink, bound, head_bound, scales, table)
  STRUCT(ChoiceRule, num_chosen, block_size, num_local, has_groups, num_queries)
  STRUCT(Compression, rate, overlaps, layer, group, index_dim, index_heads, biases, norm, index_biases, index_norm)
  STRUCT(Op, kind, input_kind, activation_kind, source, target, layer, group, rope, qk_norm, rotates_before_norm,
         is_optional, reads_source, is_sparse, num_heads, num_kv_heads, head_dim, output_dim, num_stored, norms_values,
         num_parts, first_column, num_columns, adapter_rank, scale, eps, activation, gate_limit, choice, attention,
         parts, vectors, experts, mixer, heads, adapters, altup, hyper, norm_gate, compression, latent, ngrams,
         relative_biases)
  STRUCT(StepGroup, block_table, block_table_stride, slot_mapping)
  STRUCT(ChainedSampler, kind, first, second, third)
  STRUCT(LogitRules, allowed, bad_words, end_tokens, bias_tokens, biases, bad_words_size, num_end_tokens, min_length,
         num_biases, has_penalties, repetition_penalty, presence_penalty, frequency_penalty, suppressed,
         begin_suppressed, num_suppressed, num_begin_suppressed, first_timestamp, end_token, max_initial_timestamp,
         dry_allowed_length, dry_last_n, long_breakers_size, dry_multiplier, dry_log_base, breakers, long_breakers,
         samplers, num_samplers)
  STRUCT(LogprobRows, is_wanted, num_top, is_processed, listed, num_listed, width, token_ids, logprobs, ranks)
  STRUCT(SamplingRows, is_greedy, inverse_temperature, top_k, top_p, min_p_margin, seed, changes_logits, rules,
         token_ids, max_model_len, num_prompt_tokens, num_tokens, grammar, grammar_words, logprobs, slots, positions)
  STRUCT(Step, num_tokens, num_sequences, num_logit_rows, wants_all_hidden, input_ids, positions, query_start_loc,
         table_rows, groups, kv_caches, hidden, hidden_stride, logit_rows, logits, tokens, sampling, adapters, placed,
         encoded, encoded_stride, rotary, visible, span_layers, source_lens, source_queries)
  STRUCT(Suffixes, context_length, longest_match, drafts_per_match, least_share, num_buckets, history_buckets, heads,
         previous, num_indexed, source_distance, source_length, history_size, history_begin, history_end,
         history_tokens, history_previous, history_heads)
  STRUCT(DraftLookup, num_drafts, limits, suffixes, most, shortest_match, is_searching, num_found, forced_width,
         num_forced, forced_start, forced_tokens, predicted_tokens, num_predicted, num_prompt_tokens,
         num_from_prediction, found_slots, found_counts, found_tokens)
  STRUCT(DecodeBatch, num_slots, num_groups, chooses_later, slots, max_model_len, token_ids, num_tokens,
         num_computed_tokens, block_tables, block_table_strides, kv_caches, sampling, num_drafts, lookup, tokens,
         num_sampled, num_verified, adapters, rotary_offsets, source_lens, hidden, hidden_stride)
  ENUM(Activation, silu, gelu_tanh, clamped_swiglu, relu2, sigmoid, gelu, relu, softplus, quick_gelu, clipped_gelu,
       mish, tanh, relu6, leaky_relu, hardswish, laplace, linear)
  ENUM(OpKind, embed, quantize, linear, gated_linear, rotate_store, attention, norm_add, final_norm, head, sum, route,
       gated_experts, expert_outputs, combine_experts, short_convolution, convolve, scan, gate_mixed, quantize_columns,
       latent_queries, latent_values, norm, share_squares, keep_token, place, add_placed, scale, add_normed, add_blocks,
       share_gates, sparse_gates, embed_inputs, add_inputs, gate_by_inputs, expand_streams, predict_streams,
       correct_streams, add_to_streams, load_stream, reduce_streams, share_head_squares, clamp, keep_hidden,
       choose_keys, quantize_inputs, norm_activations, store_index, keep_inputs, join_inputs, quantize_sum,
       repeat_streams, mix_streams, update_streams, norm_beside, gated_norm_add, add_kept, summarize_group,
       store_entries, scale_heads, load_key, average_group, norm_streams, embed_ngrams, gate_ngrams, convolve_ngrams,
       norm_columns, add_shortcut, share_activation_squares, convolve_inside, activate, chain_columns, scale_add,
       average_heads, convolve_heads, attend_streams, add_to_stream, copy_streams, join_block, gate_block, rotate_heads,
       drop_masked)
  FOR_EACH(FUNCTION, engine_isa, engine_isa_name, engine_select_isa, engine_can_pack, engine_packed_bytes,
           engine_pack_rows, engine_finish_packing, engine_activation_row_bytes, engine_quantize_rows,
           engine_linear_rows, engine_unpack_weight_row, engine_program_new, engine_program_free, engine_program_add,
           engine_program_add_rope, engine_program_exchange_bytes, engine_program_join, engine_program_join_experts,
           engine_program_join_round, engine_program_run, engine_program_decode, engine_program_choose,
           engine_program_profile, engine_look_up_drafts, engine_remember_answer)
  return text;
}

}  // namespace
}  // namespace engine

ENGINE_API const char* engine_abi() {
  static const std::string text = engine::describe();
  return text.c_str();
}
