"""Sizes of small models whose layers differ, and which several ranks and stages divide."""

from __future__ import annotations

from typing import Any

from engine.protocol.config import CPUBackend

PER_LAYER = {
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 10,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 90,
}
SHARING = {
    "gemma3n": (
        "Gemma3n",
        PER_LAYER
        | {
            "laurel_rank": 6,
            "activation_sparsity_pattern": [0.8, 0.9, *[0.0] * 6],
            # A table with fewer rows than ranks.
            "vocab_size_per_layer_input": 1,
        },
    ),
    # Layers with full attention have larger heads.
    "gemma4": (
        "Gemma4",
        PER_LAYER
        | {
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
            "global_head_dim": 16,
            "use_double_wide_mlp": True,
        },
    ),
    # Experts beside an MLP, and values that are the projected keys, of one head that every rank has.
    "gemma4-moe": (
        "Gemma4",
        {
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "head_dim": 8,
            "sliding_window": 10,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
    ),
}
INDEXED = {
    "num_key_value_heads": 12,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 16,
    "index_head_dim": 16,
    "index_n_heads": 8,
    "indexer_types": ["full", "shared", "full", "shared", "shared"],
    "mlp_layer_types": ["dense"] * 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
SHORTCUTS = {name: INDEXED[name] for name in INDEXED if "index" not in name} | {
    "num_hidden_layers": 4,
    "n_routed_experts": 8,
    "zero_expert_num": 3,
    "moe_topk": 4,
    "expert_ffn_hidden_size": 64,
    "ffn_hidden_size": 96,
}
"""Experts whose output is added after the next layer, some of which return their input."""
BESIDE_ATTENTION = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "sliding_window": 10,
    "sliding_window_pattern": 2,
    "intermediate_size": 64,
}
"""Experts that read the same hidden states as attention."""
LATENT_SIZES = {name: INDEXED[name] for name in INDEXED if name != "indexer_types"} | {
    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
    "sliding_window": 10,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 6,
    "swa_q_lora_rank": 20,
    "swa_kv_lora_rank": 40,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 12,
    "head_dim": 24,
    "moe_intermediate_size": 64,
    "shared_experts_intermediate_size": 64,
}
"""Latent attention of two sizes."""
SHARED_LATENT = {
    "kv_source_layers": [0, 0, 0, 3, 3],
    "no_rope_layers": [1] * 5,
    "indexer_types": ["full", "full", "shared", "full", "shared"],
}
"""Latent attention in which a layer has copies of an earlier layer's keys, and others read them in its cache."""
SPLIT_GROUPS = {
    # Both stages begin with a layer without keys. The second one has an indexer of its own.
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", *["indexed_attention"] * 2] * 2,
    "indexer_types": ["full", "full", "shared"] * 2,
    "mlp_layer_types": ["dense", *["sparse"] * 5],
    "num_key_value_heads": 12,
    # A block has room for a recurrent state.
    "kv_lora_rank": 160,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
}
SMALL_VALUES = {
    # Layers with a window have twice as many keys and values, which each rank has some of.
    "num_key_value_heads": 2,
    "v_head_dim": 16,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
INKLING = {
    "head_dim": 80,
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 16,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 40,
    "sliding_window_size": 20,
    "rel_extent": 30,
    "d_rel": 4,
    "log_scaling_n_floor": 7,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2 + ["hybrid_sliding"],
    "moe_intermediate_size": 64,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
}
TILED_HEADS = {
    # GGUF files have the first value head of each key head first, then the second ones.
    "num_key_value_heads": 12,
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 3],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
CONVOLVED = {
    # Convolutions within layers of several sizes, and experts that every token chooses.
    "inkling": (
        "InklingText",
        "Inkling",
        {
            **INKLING,
            "mlp_layer_types": ["dense", *["sparse"] * 4],
            # Otherwise the logits of random weights are all about 0.
            "logits_mup_width_multiplier": 0.01,
        },
    ),
    # Blocks that read means of sums, separate inputs of keys and values, sinks and taps of each token.
    "inkling2": (
        "Inkling2Text",
        "Inkling2",
        {
            **INKLING,
            "unpadded_vocab_size": 361,
            "qk_l2_clip_threshold": 2.0,
            "rel_l2_clip_threshold": 1.0,
            "n_layers_per_attn_res_block": 2,
        },
    ),
    # A layer of the first stage is computed again in the second, with messages from the pass before.
    "inkling2-loop": (
        "Inkling2LoopText",
        "Inkling2Loop",
        {
            **INKLING,
            "num_hidden_layers": 3,
            "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"],
            "unpadded_vocab_size": 361,
            "qk_l2_clip_threshold": 2.0,
            "rel_l2_clip_threshold": 1.0,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
            "loop_gate_rank": 32,
        },
    ),
    # Convolutions of queries, keys and values, and routers that pass on what they compute.
    "zaya": (
        "Zaya",
        "Zaya",
        {
            "head_dim": 64,
            "num_key_value_heads": 4,
            "num_attention_heads": 8,
            "layer_types": ["hybrid", "hybrid_sliding"] * 2 + ["hybrid"],
            "sliding_window": 20,
            "moe_intermediate_size": 64,
            "num_experts": 4,
            "router_hidden_size": 40,
            "cca_time0": 1,
        },
    ),
}
"""The class of the config, the family, and sizes with which blocks have room for the states of a rank."""
DENSE_HEAD = {"head_dim": 8, "num_key_value_heads": 12, "local_attention": 32}
"""A dense layer before the output projection."""
TWO_MIXTURES = {
    "num_key_value_heads": 12,
    "moe_num_experts": 5,
    "moe_k": 3,
    "moe_intermediate_size": [96, 64],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 6, 4]},
}
_PUBLISHED_SIZES: dict[str, dict[str, Any]] = {
    # Every stage needs the embeddings of tokens.
    "Talkie": {},
    "KimiK3": {"kv_lora_rank": 160},
    "AliceAI": {"head_dim": 128},
    "BailingMoeV2_5": {"kv_lora_rank": 256},
    "MiniCPMSALA": {"head_dim": 128},
    "OpenELM": {},
    "SmallThinker": {},
    "Step1": {},
    "Solar": {},
}
_IN_TORCH = {
    "PanguProMoEV2": {},
    "IQuestQ1": {},
    "Step5": {},
    "LongcatFlashNgram": {},
    "DeepseekV41": {},
    "GigaChat35": {"kv_lora_rank": 160},
    "JetNemotron": {"head_dim": 128},
    "Motif": {"num_attention_heads": 12, "num_noise_heads": 4, "num_key_value_heads": 4},
    "Phi4Flash": {},
    "rwkv6": {"hidden_size": 96, "num_hidden_layers": 5, "num_heads": 6},
    "rwkv7": {"hidden_size": 96, "num_hidden_layers": 5, "head_dim": 16},
}


def published_sizes(backend: CPUBackend) -> dict[str, dict[str, Any]]:
    """Return the sizes of families without a class in transformers that this backend supports."""
    return _PUBLISHED_SIZES if backend is CPUBackend.NATIVE else _PUBLISHED_SIZES | _IN_TORCH
