"""Sizes of families with compressed attention."""

from support.families.experts import LONG

COMPRESSED = {
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "q_lora_rank": 20,
    "partial_rotary_factor": 0.25,
    "o_groups": 3,
    "o_lora_rank": 12,
    "sliding_window": 10,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 11},
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "hc_mult": 3,
    "swiglu_limit": 0.5,
    "index_topk": 5,
    "index_head_dim": 8,
    "index_n_heads": 16,
    # Transformers ignores that corrections are not truncated.
    "rope_parameters": LONG | {"truncate": False},
}
"""Rates that neither divide a block nor are its multiples."""
HASHED = COMPRESSED | {
    "num_hidden_layers": 5,
    "layer_types": [*COMPRESSED["layer_types"], "heavily_compressed_attention"],
    "mlp_layer_types": ["moe", "hash_moe"] * 2 + ["moe"],
    "o_groups": 4,
    "moe_intermediate_size": 384,
}
"""Sizes that two workers can share; the experts of later layers are chosen by the token, too."""

WITH_ENTRIES = {
    "deepseek-v4": ("DeepseekV4", COMPRESSED),
    # No layer needs its indexer. Entries summarize more tokens than the window has, and there is one stream.
    "deepseek-v4-unlimited": (
        "DeepseekV4",
        COMPRESSED
        | {
            "index_topk": 100,
            "hc_mult": 1,
            "o_groups": 1,
            "sliding_window": 3,
            "scoring_func": "sigmoid",
            "swiglu_limit": 10.0,
            # In sections, YaRN may change the scores.
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
                "compress": LONG | {"partial_rotary_factor": 0.25},
            },
        },
    ),
}
