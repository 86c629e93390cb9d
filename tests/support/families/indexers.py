"""Sizes of families with latent attention whose indexers choose keys."""

from support.families.experts import EXPERTS, GROUPS, LATENT, LONG

_AS_IN_TRANSFORMERS = {
    "rope_interleave": False,
    "indexer_rope_interleave": False,
    "rms_norm_eps": 1e-6,
}
"""Fields that published Hy4 checkpoints lack: rotations of halves, and an epsilon of the latent vectors alone."""
HY4 = (
    LATENT
    | EXPERTS
    | {
        "n_routed_experts": 6,
        "index_topk": 20,
        "index_head_dim": 16,
        "index_n_heads": 16,
        "indexer_types": ["full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "hc_mult": 3,
        "swiglu_limit": 0.5,
    }
)
WITH_INDEXERS = {
    "axk2": (
        "AXK2",
        LATENT
        | {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "index_topk": 20,
            "index_head_dim": 16,
            "index_n_heads": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "gated_norm_rank": 5,
            "rope_parameters": LONG,
        },
    ),
    "axk2-groups": (
        "AXK2",
        LATENT | EXPERTS | GROUPS | {"index_topk": 20, "index_head_dim": 16, "index_n_heads": 16},
    ),
    "glm5": (
        "GlmMoeDsa",
        LATENT
        | EXPERTS
        | {
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "index_topk": 20,
            "index_head_dim": 16,
            "index_n_heads": 8,
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "hy4": ("HYV4", HY4 | _AS_IN_TRANSFORMERS),
    "hy4-one-stream": (
        "HYV4",
        LATENT
        | EXPERTS
        | _AS_IN_TRANSFORMERS
        | {
            "n_routed_experts": 6,
            "index_topk": 20,
            "index_head_dim": 16,
            "index_n_heads": 16,
            "mlp_layer_types": ["sparse"] * 3,
            "hc_mult": 1,
        },
    ),
}
