"""The keys of experts and of latent attention, for `gguf_writer`."""

from typing import Any

from gguf import ExpertGatingFuncType, GGUFWriter

LATENT = ("deepseek2", "deepseek32", "glm-dsa", "mistral4")
"""Architectures whose files have the matrices of each head apart."""


def add_latent(writer: GGUFWriter, config: Any, splits_heads: bool) -> None:
    """Add the keys of latent attention, after those of attention with a key for each head."""
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    key_length = config.qk_nope_head_dim + config.qk_rope_head_dim
    if splits_heads:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(key_length)
        writer.add_value_length_mla(config.v_head_dim)
    else:
        writer.add_key_length(key_length)
        writer.add_value_length(config.v_head_dim)
    if hasattr(config, "index_topk"):
        prefix = f"{writer.arch}.attention.indexer"
        writer.add_uint32(f"{prefix}.head_count", config.index_n_heads)
        writer.add_uint32(f"{prefix}.key_length", config.index_head_dim)
        writer.add_uint32(f"{prefix}.top_k", config.index_topk)
    if beta := config.rope_parameters.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(beta)
    if weight := config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)


def add_experts(writer: GGUFWriter, config: Any, num_experts: int) -> None:
    writer.add_expert_count(num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    size = getattr(config, "moe_intermediate_size", config.intermediate_size)
    writer.add_expert_feed_forward_length(size)
    shared = getattr(config, "shared_expert_intermediate_size", 0) or getattr(
        config, "shared_intermediate_size", 0
    )
    if shared:
        writer.add_expert_shared_feed_forward_length(shared)
    if config.model_type == "ernie4_5_moe":
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    if config.model_type == "granitemoeshared":
        writer.add_expert_weights_norm(True)
    if config.model_type == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    if config.model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if hasattr(config, "kv_lora_rank"):
        is_softmax = config.model_type in ("deepseek_v2", "mistral4")
        kinds = ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SOFTMAX if is_softmax else kinds.SIGMOID)
    if hasattr(config, "index_block_size"):
        prefix = f"{writer.arch}.attention.indexer"
        writer.add_uint32(f"{prefix}.head_count", config.index_n_heads)
        writer.add_uint32(f"{prefix}.key_length", config.index_head_dim)
        writer.add_uint32(f"{prefix}.top_k", config.index_topk_blocks)
        writer.add_uint32(f"{prefix}.block_size", config.index_block_size)
        writer.add_uint32(f"{prefix}.local_blocks", config.index_local_blocks)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type == "hy_v3":
        size *= config.num_shared_experts
        writer.add_expert_shared_feed_forward_length(size)
        writer.add_expert_weights_scale(config.router_scaling_factor)
    elif config.model_type == "afmoe":
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_weights_scale(config.route_scale)
    elif hasattr(config, "n_shared_experts") or config.model_type == "exaone_moe":
        names = ("n_shared_experts", "num_shared_experts")
        shared = next(getattr(config, name) for name in names if hasattr(config, name))
        writer.add_expert_shared_count(shared)
        is_dense = getattr(config, "mlp_layer_types", None)
        first = is_dense.count("dense") if is_dense else config.first_k_dense_replace
        writer.add_leading_dense_block_count(first)
        if config.n_group:
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
