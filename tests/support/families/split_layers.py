"""The layers of other families that the tests of parallel workers split."""

from support.families.experts import BLOCKS_OF_KEYS
from support.families.split import DENSE_HEAD

MIXED = {
    "num_key_value_heads": 12,
    "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
}
OTHER_LAYERS = {
    # Tensors of fused projections, and norms over the heads of all ranks, of which two share one.
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {"num_key_value_heads": 4, "partial_rotary_factor": 1.0, "sliding_window": None},
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 4}),
    # Layer norms, embeddings of positions, and transposed matrices.
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"head_dim": 8, "n_inner": 384}),
    # Fused projections by key/value head, of which there are many or one, and blocks side by side.
    "bloom": ("BloomConfig", "BloomForCausalLM", {"head_dim": 8}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {"ffn_hidden_size": 384}),
    # Interleaved rotation, norms with the weights of each head, and biases of the head.
    "cohere": ("CohereConfig", "CohereForCausalLM", {"head_dim": 8, "use_qk_norm": True}),
    # Norms of all heads' outputs and of an MLP's intermediate elements.
    "bitnet": ("BitNetConfig", "BitNetForCausalLM", {"head_dim": 8, "num_key_value_heads": 4}),
    # Latent attention, whose one key all ranks have.
    "minicpm3": (
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        {
            "num_key_value_heads": 12,
            "q_lora_rank": 40,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    # Every rank stores the index key of a token, and chooses blocks for its own key/value heads.
    "minimax-m3": (
        "MiniMaxM3VLTextConfig",
        "MiniMaxM3VLForCausalLM",
        BLOCKS_OF_KEYS | {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 4]},
    ),
    "modernbert-decoder": ("ModernBertDecoderConfig", "ModernBertDecoderForCausalLM", DENSE_HEAD),
    "phi": ("PhiConfig", "PhiForCausalLM", {"head_dim": 8, "num_key_value_heads": 12}),
    # Recurrent layers: channels, heads that share B and C and a norm, and heads of queries and keys.
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        MIXED
        | {
            "layer_types": ["conv", "full_attention"] * 2 + ["conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        MIXED
        | {
            "num_local_experts": 0,
            "shared_intermediate_size": 384,
            "mamba_n_heads": 12,
            "mamba_d_state": 8,
        },
    ),
    "qwen3.5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        MIXED
        | {
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 12,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
    ),
    "kimi-linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        MIXED
        | {
            "q_lora_rank": None,
            "kv_lora_rank": 160,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
        },
    ),
    # The time steps of all channels come from a product that is summed over the ranks. No layer has attention.
    "mamba": ("MambaConfig", "MambaForCausalLM", {"state_size": 8, "time_step_rank": 5}),
    # The experts follow a projection, whose sum all ranks have.
    "nemotron-h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "moe"],
            "mamba_num_heads": 12,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 4,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 20,
            "mlp_bias": True,
        },
    ),
}
NATIVE_LAYERS = {k: v for k, v in OTHER_LAYERS.items() if k not in ("phi3", "qwen2")}
