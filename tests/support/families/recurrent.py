"""Families with recurrent layers."""

from typing import Any

from support.families.experts import EXPERTS, GROUPS, LATENT, LONG

MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
NEMOTRON_H = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "use_bias": True,
}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 8,
}
QWEN4 = DELTA_NET | {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "hc_count": 3,
    "hc_lowrank": 20,
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 12,
    "indexer_budget": 12,
    "indexer_compress_ratio": 3,
}
NGRAMS = {
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 24,
    "ple_conv_kernel_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 30,
    "split_ngram_parts": 3,
    "output_gate_type": "sigmoid",
}
HASHED_NGRAMS = (
    QWEN4
    | NGRAMS
    | {
        "num_key_value_heads": 12,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
        "hc_count": 2,
        "ple_layer_ids": [1, 5],
        "ple_conv_kernel_size": 2,
        "indexer_n_heads": 16,
        "indexer_head_dim": 16,
    }
)
"""Layers of which those of later pipeline stages read the tokens, too."""
MAMBA = {"state_size": 12, "time_step_rank": 5, "tie_word_embeddings": True}
SHARED_BLOCKS = {
    "num_hidden_layers": 5,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
    "num_key_value_heads": None,
    "head_dim": 16,
    "mamba_d_state": 8,
    "mamba_expand": 1,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "num_mem_blocks": 2,
    # The three low-rank results together are wider than the inputs of the block.
    "adapter_rank": 40,
    "use_shared_attention_adapter": True,
    "use_mem_rope": True,
}
GROUPED_KEYS = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", *["indexed_attention"] * 3],
    "indexer_types": ["full", "full", "shared", "full"],
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "index_topk": 15,
    "index_kpool": 3,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "linear_num_heads": 3,
    "linear_head_dim": 16,
    "hc_mult": 3,
    "swiglu_limit": 0.5,
}
"""Groups of keys that do not divide a block. A layer uses the choice of a layer whose cache is in another group."""
INKLING2 = {
    "num_hidden_layers": 5,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "sliding_window_size": 9,
    "rel_extent": 20,
    "d_rel": 4,
    "log_scaling_n_floor": 7,
    "qk_l2_clip_threshold": 2.0,
    "rel_l2_clip_threshold": 1.0,
    "mlp_gate_softcap": 0.5,
    "mlp_up_softcap": 0.7,
    "n_layers_per_attn_res_block": 2,
    "layer_types": ["hybrid", *["hybrid_sliding"] * 2, "hybrid", "hybrid_sliding"],
    "moe_intermediate_size": 24,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "vocab_size": 99,
    "unpadded_vocab_size": 97,
}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "inkling": (
        "InklingText",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 8,
            "sliding_window_size": 9,
            "rel_extent": 20,
            "d_rel": 4,
            "log_scaling_n_floor": 7,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "moe_intermediate_size": 24,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "logits_mup_width_multiplier": 2.0,
            "vocab_size": 99,
            "unpadded_vocab_size": 97,
        },
    ),
    "inkling2": ("Inkling2Text", INKLING2),
    # Layers that are computed three times, with messages between the passes.
    "inkling2-loop": (
        "Inkling2LoopText",
        INKLING2
        | {
            "num_hidden_layers": 8,
            "layer_types": ["hybrid", *["hybrid_sliding"] * 2, "hybrid"] * 2,
            "loop_layer_index_start": 2,
            "loop_layer_index_end": 6,
            "loop_gate_rank": 8,
        },
    ),
    "zaya": (
        "Zaya",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "layer_types": ["hybrid", "hybrid_sliding"] * 2,
            "sliding_window": 9,
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "router_hidden_size": 20,
            "cca_time0": 3,
            "lm_head_bias": True,
        },
    ),
    "qwen4": ("Qwen4ExpText", QWEN4),
    # A token of the prompts ends n-grams.
    "qwen4-ngrams": ("Qwen4ExpText", QWEN4 | NGRAMS | {"eos_token_id": 7}),
    "mamba": ("Mamba", MAMBA | {"use_bias": True}),
    "falcon-mamba": ("FalconMamba", MAMBA | {"use_conv_bias": False, "expand": 3}),
    "xlstm": (
        "xLSTM",
        {
            "num_heads": 4,
            "qk_dim_factor": 0.5,
            "tie_word_embeddings": True,
            "autocast_kernel_dtype": "float32",
            "hidden_size": 128,
            # Small outputs of heads are not multiplied by large factors.
            "norm_eps": 0.01,
        },
    ),
    # The final norm has another epsilon.
    "rwkv4": ("Rwkv", {"layer_norm_epsilon": 0.01}),
    "recurrent-gemma": (
        "RecurrentGemma",
        {
            "num_hidden_layers": 4,
            "lru_width": 72,
            "attention_window_size": 9,
            # Published configs have no length.
            "max_position_embeddings": None,
            "logits_soft_cap": 5.0,
            "attention_bias": True,
        },
    ),
    "mamba2": (
        "Mamba2",
        {"num_heads": 8, "head_dim": 12, "n_groups": 2, "state_size": 16, "use_bias": True},
    ),
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 4,
            "mamba_d_state": 12,
            "mamba_dt_rank": 5,
        },
    ),
    "zamba": (
        "Zamba",
        {
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"],
            "head_dim": 16,
            "mamba_d_state": 8,
            "mamba_dt_rank": 5,
            "n_mamba_heads": 4,
            "mamba_proj_bias": True,
        },
    ),
    # Three layers use two blocks in turn.
    "zamba2": ("Zamba2", SHARED_BLOCKS),
    # Each of these layers has a block of its own. The recurrent layers' norms have another epsilon.
    "zamba2-untied": (
        "Zamba2",
        SHARED_BLOCKS | {"tie_word_embeddings": False, "rms_norm_eps": 1e-3},
    ),
    "dory": (
        "Dory",
        {
            "num_hidden_layers": 5,
            "head_dim": 12,
            "n_input_layers": 1,
            "n_output_layers": 1,
            "n_recurrent_loops": 2,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            # Trained factors are relative to this number.
            "initializer_range": 0.15,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": LONG,
            },
            "ngpt_alpha_init": 0.4,
        },
    ),
    "hrm-text": (
        "HrmText",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": None,
            "head_dim": 12,
            "H_cycles": 2,
            "L_cycles": 2,
            "embedding_scale": 1.7,
        },
    ),
    "minimax": (
        "MiniMax",
        {
            "num_local_experts": 4,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "full_attn_alpha_factor": 3.5,
            "full_attn_beta_factor": 0.7,
            "linear_attn_alpha_factor": 0.6,
            "linear_attn_beta_factor": 1.3,
            "mlp_alpha_factor": 2.0,
            "mlp_beta_factor": 0.9,
        },
    ),
    "lara-mini": (
        "LaraMini",
        DELTA_NET
        | EXPERTS
        | {
            "num_hidden_layers": 4,
            "layer_types": [
                "linear_attention",
                "sliding_attention",
                "linear_attention",
                "full_attention",
            ],
            "sliding_window": 9,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "lfm3": (
        "Lfm3",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "attention_bias": True,
            "conv_L_cache": 5,
            "sliding_window": 9,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 16,
            "conv_bias": True,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        MAMBA2
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "granite-hybrid-experts": (
        "GraniteMoeHybrid",
        MAMBA2
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "shared_intermediate_size": 24,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
        },
    ),
    "falcon-h1": (
        "FalconH1",
        MAMBA2
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "mlp_multipliers": [0.9, 0.5],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
        },
    ),
    "falcon-h1-without-norm": ("FalconH1", MAMBA2 | {"num_hidden_layers": 2, "mamba_d_ssm": 64}),
    "nemotron-h": (
        "NemotronH",
        NEMOTRON_H
        | {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            # It has a head of its own nevertheless.
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h-experts": (
        "NemotronH",
        NEMOTRON_H
        | GROUPS
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "n_shared_experts": 1,
        },
    ),
    "nemotron-h-latent-experts": (
        "NemotronH",
        NEMOTRON_H
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 6,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 20,
            "mlp_bias": True,
        },
    ),
    "kimi-linear": (
        "KimiLinear",
        LATENT
        | GROUPS
        | {
            "q_lora_rank": None,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "linear_num_heads": 3,
            "linear_head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
    "ling3": (
        "BailingHybrid",
        LATENT
        | GROUPS
        | {
            "q_lora_rank": None,
            "head_dim": 14,
            "num_hidden_layers": 4,
            "layer_group_size": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "ling3-unbounded": (
        "BailingHybrid",
        LATENT
        | {
            "head_dim": 12,
            # It has a head of its own nevertheless.
            "tie_word_embeddings": True,
            "kda_safe_gate": False,
            "layer_group_size": 2,
            "num_local_experts": 5,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "olmo-hybrid": (
        "OlmoHybrid",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_hidden_layers": 2,
            # Transformers saves the convolutions in equal parts, whatever these numbers are.
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
    ),
    "bamba": ("Bamba", MAMBA2 | {"attn_layer_indices": [1], "mamba_n_groups": 2}),
    "qwen3.5": ("Qwen3_5Text", DELTA_NET),
    "qwen3.5-full": ("Qwen3_5Text", DELTA_NET | {"layer_types": ["full_attention"] * 3}),
    "qwen3.5-moe": (
        "Qwen3_5MoeText",
        DELTA_NET
        | EXPERTS
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 40,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        EXPERTS | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "qwen3-next": (
        "Qwen3Next",
        DELTA_NET
        | EXPERTS
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 40,
        },
    ),
}
