"""Families with a tower for images, by the names of their classes: the type and the sizes of their text decoder."""

from typing import Any

from support.families.experts import LATENT, LONG
from support.families.indexers import HY4
from support.families.recurrent import GROUPED_KEYS, NGRAMS, QWEN4

MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
VISION_SIZES = {
    "depth": 1,
    "embed_dim": 48,
    "hidden_size": 48,
    "out_hidden_size": 48,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "deepstack_visual_indexes": [],
    "fullatt_block_indexes": [],
}
AUDIO_SIZES = {"hidden_sizes": [8] * 4, "depths": [1] * 4}
GLM_AXES = MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Aria": ("aria_text", {"moe_num_experts": 5, "moe_topk": 2, "mlp_bias": True}),
    "CohereCompass": (
        "cohere_compass_text",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 9,
            "rope_parameters": {
                "sliding_attention": MROPE | {"rope_theta": 100.0},
                "full_attention": None,
            },
        },
    ),
    "Ernie4_5_VLMoe": (
        "ernie4_5_vl_moe_text",
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": [24, 16],
        },
    ),
    "Exaone4_5_": ("exaone4", {"sliding_window": 9}),
    "HunYuanVL": (
        "hunyuan_vl_text",
        {
            "head_dim": 16,
            "rope_parameters": MROPE
            | {
                "rope_type": "dynamic",
                "factor": 2.0,
                "alpha": 1000.0,
                "mrope_section": [2, 2, 2, 2],
            },
        },
    ),
    "Glm4v": ("glm4v_text", {"rope_parameters": GLM_AXES}),
    "Glm46V": ("glm4v_text", {"rope_parameters": GLM_AXES}),
    "Glm4vMoe": (
        "glm4v_moe_text",
        {
            "head_dim": 8,
            "rope_parameters": GLM_AXES,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "Glm5Next": ("glm5_next_text", GROUPED_KEYS),
    "GraniteDocling": ("granite_docling_text", {"logits_scaling": 0.5}),
    "HyperCLOVAXVisionV2": ("hyperclovax", {}),
    "Kimi_K25": (
        "deepseek_v3",
        LATENT | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "Lfm3Vl": ("lfm3", {"layer_types": ["conv", "full_attention", "conv"]}),
    "Lfm2Vl": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "LlavaNextVideo": ("llama", {}),
    "MistralLarge4": (
        "mistral_large4_text",
        LATENT
        | {
            "num_hidden_layers": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "index_topk": 9,
            "index_head_dim": 16,
            # With fewer heads, several keys would have a score of 0.
            "index_n_heads": 16,
            "rope_parameters": LONG | {"attention_factor": 1.0},
            # A layer without its own keys reads those of the source, or stores copies beside its index keys.
            "kv_source_layers": [0, 1, 1, 3, 1, 3],
            "no_rope_layers": [1, 1, 1, 0, 1, 0],
            "indexer_types": ["full", "full", "full", "full", "shared", "shared"],
        },
    ),
    "HYV4VL": (
        "hy_v4_vl_text",
        HY4 | {"rms_norm_eps": 1e-4, "rope_parameters": MROPE},
    ),
    "Qwen4Exp": (
        "qwen4_exp_text",
        QWEN4
        | NGRAMS
        | {
            "eos_token_id": 7,
            "indexer_head_dim": 8,
            "rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_interleaved": True},
        },
    ),
    "Step3p7": (
        "step3p5",
        {
            "num_hidden_layers": 5,
            "pad_token_id": 3,
            "head_dim": 16,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            "sliding_window": 9,
            "num_sliding_attention_heads": 8,
            "query_pre_attn_scalar": 24,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "share_expert_dim": 40,
            "moe_router_scaling_factor": 1.8,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
            "swiglu_limits": [0.0, 0.0, 0.3, 0.3, 0.3],
            "swiglu_limits_shared": [0.0, 0.2, 0.0, 0.3, 0.4],
            "rope_theta": [1e4, 5e5, 5e5, 5e5, 1e4],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5],
        },
    ),
    "MuseGlimmer": (
        "muse_glimmer_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 9,
            "post_norm_eps": 0.01,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "MuseSpark": (
        "muse_spark_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 9,
            "post_norm_eps": 0.01,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_hidden_size": 32,
            "routed_scaling_factor": 1.7,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        },
    ),
    "VideoLlama3": ("qwen2", {}),
    "VipLlava": ("llama", {}),
    "Mistral3": ("ministral3", {"head_dim": 16}),
    "Qwen2VL": ("qwen2_vl_text", {"rope_parameters": MROPE}),
    "Qwen2_5_VL": ("qwen2_5_vl_text", {"rope_parameters": MROPE}),
    "Qwen3VL": ("qwen3_vl_text", {"head_dim": 8, "rope_parameters": MROPE}),
}
