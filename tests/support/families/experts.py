"""Families with experts or latent attention."""

from typing import Any

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GROUPS = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
LONG = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
BLOCKS_OF_KEYS = {
    "num_key_value_heads": 2,
    "dense_intermediate_size": 40,
    "intermediate_size": 24,
    "shared_intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
    "index_n_heads": 2,
    "index_head_dim": 12,
    "index_block_size": 6,
    "index_topk_blocks": 3,
}
WITH_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 11}),
    "jetmoe": (
        "JetMoe",
        {
            "num_local_experts": 5,
            "kv_channels": 12,
            "tie_word_embeddings": False,
            # The norms of layers have another one.
            "rms_norm_eps": 0.01,
        },
    ),
    "mixtral-one": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "qwen2-moe": (
        "Qwen2Moe",
        EXPERTS
        | {
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        EXPERTS
        | {
            "head_dim": 16,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "qwen2-moe-all": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen3-moe-all": ("Qwen3Moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "dbrx": (
        "Dbrx",
        {
            "d_model": 48,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 5e5},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 3},
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
    "granite-moe": (
        "GraniteMoe",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "logits_scaling": 4.0},
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {"num_local_experts": 4, "shared_intermediate_size": 24, "attention_multiplier": 0.2},
    ),
    "glm4-moe": (
        "Glm4Moe",
        EXPERTS | GROUPS | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8},
    ),
    # Only the first layer attends to all keys; the others choose three of at most 15 blocks.
    "minimax-m3": (
        "MiniMaxM3VLText",
        BLOCKS_OF_KEYS
        | {
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "head_dim": 16,
            "attention_chunk_size": 16,
            "floor_scale": 8,
        },
    ),
    "aria": ("AriaText", {"moe_num_experts": 5, "moe_topk": 2, "head_dim": 16}),
    "ernie-moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "head_dim": 16},
    ),
    "ernie-moe-biases": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 4,
            "moe_k": 1,
            "moe_intermediate_size": 24,
            "use_bias": True,
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {"num_experts": 5, "moe_topk": 2, "head_dim": 16}),
    "phi-moe": (
        "Phimoe",
        {"num_local_experts": 5, "router_jitter_noise": 0.2, "lm_head_bias": True},
    ),
    "dots1": ("Dots1", EXPERTS | GROUPS | {"norm_topk_prob": True}),
    "deepseek-v2": (
        "DeepseekV2",
        LATENT
        | {
            "q_lora_rank": None,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "rope_parameters": LONG,
        },
    ),
    "dots3-note": (
        "Dots3NoteText",
        LATENT
        | GROUPS
        | {
            "num_hidden_layers": 5,
            "head_dim": 20,
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
            "sliding_window": 9,
            **{f"swa_num_{name}": 4 for name in ("attention_heads", "key_value_heads")},
            "swa_q_lora_rank": 18,
            "swa_kv_lora_rank": 30,
            "swa_head_dim": 22,
            "swa_qk_nope_head_dim": 16,
            "swa_v_head_dim": 14,
            "index_topk": 12,
            "index_head_dim": 16,
            # With fewer heads, several keys would have a score of 0.
            "index_n_heads": 16,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_experts_intermediate_size": 20,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT
        | {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "rope_parameters": LONG,
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        LATENT
        | {
            "qk_nope_head_dim": 1,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "minicpm3": ("MiniCPM3", LATENT),
    "phi-moe-longrope": (
        "Phimoe",
        {
            "num_local_experts": 5,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.5, 2.5, 3.5, 4.5],
                "short_mscale": 1.3,
                "long_mscale": 1.6,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "phi-moe-one": ("Phimoe", {"num_local_experts": 5, "num_experts_per_tok": 1}),
    "longcat": (
        "LongcatFlash",
        LATENT
        | {
            "num_hidden_layers": 4,
            "n_routed_experts": 5,
            "zero_expert_num": 3,
            "head_dim": 8,
            "moe_topk": 3,
            "expert_ffn_hidden_size": 24,
            "ffn_hidden_size": 40,
        },
    ),
    "youtu": ("Youtu", LATENT | {"tie_word_embeddings": True, "attention_bias": True}),
    "mistral4": (
        "Mistral4",
        LATENT
        | {
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "rope_parameters": LONG | {"llama_4_scaling_beta": 0.5},
        },
    ),
    "axk1": (
        "AXK1",
        LATENT
        | {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "sarvam-mla": (
        "SarvamMLA",
        LATENT
        | {
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "sarvam-moe": (
        "SarvamMoE",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    # Sarvam's models have the layers of Ling 2.
    "ling2": (
        "SarvamMoE",
        {
            "published_as": "BailingMoeV2",
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 2,
        },
    ),
    "exaone-moe": (
        "ExaoneMoe",
        EXPERTS | {"sliding_window": 9, "sliding_window_pattern": 2, "n_group": 3, "topk_group": 2},
    ),
    "hunyuan3": ("HYV3", EXPERTS | {"head_dim": 16, "num_shared_experts": 2}),
    "solar-open": (
        "SolarOpen",
        {
            "n_shared_experts": 0,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "attention_bias": True,
        },
    ),
    "afmoe": (
        "Afmoe",
        EXPERTS
        | {
            "num_hidden_layers": 4,
            "num_dense_layers": 2,
            "head_dim": 16,
            "sliding_window": 9,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
    ),
    "flint": (
        "Flint",
        EXPERTS
        | {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "sliding_window": 9,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "mellum": (
        "Mellum",
        EXPERTS
        | {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "granite-moe-windows": (
        "GraniteMoeSWA",
        {
            "sliding_window": 9,
            "num_local_experts": 4,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere2-moe": (
        "Cohere2Moe",
        {
            "head_dim": 8,
            "num_experts": 5,
            "num_shared_experts": 1,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
        },
    ),
    "cohere2-moe-dense": (
        "Cohere2Moe",
        {
            "head_dim": 8,
            "num_experts": 5,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 40,
            "expert_selection_fn": "sigmoid",
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
        },
    ),
    "mimo-v2": (
        "MiMoV2Flash",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 12,
            "head_dim": 12,
            "v_head_dim": 8,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "attention_bias": True,
        },
    ),
    "laguna": (
        "Laguna",
        EXPERTS
        | {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_attention_heads_per_layer": [6, 8, 2],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "shared_expert_intermediate_size": 40,
            "moe_routed_scaling_factor": 1.8,
            "moe_router_logit_softcapping": 2.0,
        },
    ),
    "laguna-elements": (
        "Laguna",
        EXPERTS | {"head_dim": 12, "gating": "per-element", "shared_expert_intermediate_size": 40},
    ),
    "laguna-whole-heads": (
        "Laguna",
        EXPERTS
        | {
            "head_dim": 12,
            "shared_expert_intermediate_size": 40,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "beam": (
        "Beam",
        EXPERTS
        | {
            "num_hidden_layers": 4,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
            "head_dim": 12,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            # Large enough that its growth from layer to layer matters.
            "rms_norm_eps": 0.01,
        },
    ),
    "kolibri": (
        "Kolibri1",
        EXPERTS
        | {
            "intermediate_size": None,
            "head_dim": 16,
            "num_hidden_layers": 5,
            "sliding_window": 9,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "flex-olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 2}),
    "deepseek-v3.2": (
        "DeepseekV32",
        LATENT
        | EXPERTS
        | GROUPS
        | {"index_topk": 20, "index_head_dim": 16, "index_n_heads": 8, "rope_parameters": LONG},
    ),
}
GATED = {
    # Layers have different numbers of query heads, whose gates are softplus.
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
    "num_attention_heads_per_layer": [12, 8, 4, 8, 12],
    "mlp_layer_types": ["dense", *["sparse"] * 4],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_router_logit_softcapping": 2.0,
}
"""Sizes of a Laguna that two workers can share."""
