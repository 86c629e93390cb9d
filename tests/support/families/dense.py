"""Families with attention and MLPs; some of Gemma 4 have experts, too."""

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PHI3_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.5, 3.5, 4.5],
    "partial_rotary_factor": 1.0,
}
GEMMA4 = {
    "num_hidden_layers": 8,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 10,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"tie_word_embeddings": False}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 10,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 8,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 10,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            "num_hidden_layers": 8,
            "head_dim": 16,
            "sliding_window": 10,
            "vocab_size_per_layer_input": 90,
            "hidden_size_per_layer_input": 120,
            "num_kv_shared_layers": 3,
            # More than the hidden size, like a row of the inputs below.
            "laurel_rank": 150,
            "activation_sparsity_pattern": [0.8, 0.9, *[0.0] * 5, 0.5],
            "intermediate_size": [80, 64] * 4,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4-dense": ("Gemma4", GEMMA4),
    "gemma4-shared": (
        "Gemma4",
        GEMMA4
        | {
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        GEMMA4
        | {
            "global_head_dim": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    # No layer has the heads that the config names first.
    "gemma4-full": (
        "Gemma4",
        GEMMA4
        | {
            "num_hidden_layers": 1,
            "layer_types": ["full_attention"],
            "global_head_dim": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4-unified": (
        "Gemma4Unified",
        {name: value for name, value in GEMMA4.items() if not name.endswith("layer_input")},
    ),
    "phi3": ("Phi3", {"sliding_window": None}),
    "phi3-longrope-short": (
        "Phi3",
        {"rope_parameters": PHI3_LONG, "original_max_position_embeddings": 256},
    ),
    "phi3-longrope-long": (
        "Phi3",
        {"rope_parameters": PHI3_LONG, "original_max_position_embeddings": 32},
    ),
    # Three of eight dimensions are rotated, so in fact four.
    "phi3-partial": (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.4,
            }
        },
    ),
    "smollm3": (
        "SmolLM3",
        {
            "num_hidden_layers": 5,
            "no_rope_layer_interval": 2,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        },
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma-activation": ("Gemma", {"head_dim": 16, "hidden_act": "relu2"}),
    "mistral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "ministral": (
        "Ministral",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3}),
    "arcee": ("Arcee", {"mlp_bias": True}),
    "apertus-1.5": ("Apertus1p5Text", {"vocab_size": 120, "output_vocab_size": 97}),
    "apertus-1.5-tied": (
        "Apertus1p5Text",
        {"vocab_size": 120, "output_vocab_size": 97, "tie_word_embeddings": True},
    ),
    "bitnet": ("BitNet", {"attention_bias": True}),
    "ernie4.5": ("Ernie4_5", {"head_dim": 16, "use_bias": True}),
    "exaone4": (
        "Exaone4",
        {"num_hidden_layers": 5, "sliding_window": 9, "sliding_window_pattern": 4},
    ),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 12, "attention_bias": False}),
    "helium": ("Helium", {"head_dim": 8, "attention_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 1.0,
                "alpha": 100.0,
            },
        },
    ),
    # The factor of yarn vanishes in the norms that follow the rotation.
    "nanochat": (
        "NanoChat",
        {
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "olmo3": ("Olmo3", {"num_hidden_layers": 5, "sliding_window": 9}),
    "seed-oss": ("SeedOss", {"head_dim": 16, "attention_out_bias": True}),
    "cohere": ("Cohere", {"logit_scale": 0.25, "attention_bias": True}),
    "cohere-norms": ("Cohere", {"use_qk_norm": True, "layer_norm_eps": 1e-3}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 9}),
    "nemotron": ("Nemotron", {"hidden_size": 96, "mlp_bias": True, "attention_bias": True}),
    "olmo": ("Olmo", {"clip_qkv": 0.5}),
    "phi": ("Phi", {"num_key_value_heads": 6}),
    "phi-norms": ("Phi", {"qk_layernorm": True}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": (
        "StableLm",
        {"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.25},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 11}),
    "modernbert-decoder": (
        "ModernBertDecoder",
        {
            "num_key_value_heads": 6,
            "local_attention": 19,
            "global_attn_every_n_layers": 2,
            "classifier_bias": True,
            "pad_token_id": 1,
            "bos_token_id": 1,
        },
    ),
    "gpt2": ("GPT2", {"n_inner": 56, "scale_attn_by_inverse_layer_idx": True}),
    "gpt-bigcode": ("GPTBigCode", {"n_inner": 56}),
    "gpt-bigcode-heads": (
        "GPTBigCode",
        {"n_inner": 80, "multi_query": False, "scale_attn_weights": False},
    ),
    "gpt-neox-japanese": ("GPTNeoXJapanese", {"intermediate_multiple_size": 2, "rotary_pct": 0.5}),
    # The norms of layers have another epsilon.
    "ctrl": ("CTRL", {"dff": 56, "layer_norm_epsilon": 0.01}),
    "diffllama": ("DiffLlama", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "doge": ("Doge", {"keep_window_size": 256, "attention_bias": True}),
    "gptj": ("GPTJ", {"n_inner": 56, "rotary_dim": 4}),
    "codegen": ("CodeGen", {"n_inner": 56, "rotary_dim": 4, "num_attention_heads": 8}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt-neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "opt": ("OPT", {"ffn_dim": 56}),
    "opt-350m": ("OPT", {"ffn_dim": 56, "word_embed_proj_dim": 20, "do_layer_norm_before": False}),
    "biogpt": ("BioGpt", {"layer_norm_eps": 1e-12, "hidden_act": "gelu_python"}),
    "openai-gpt": ("OpenAIGPT", {}),
    "persimmon": ("Persimmon", {}),
    "persimmon-without-norms": ("Persimmon", {"qk_layernorm": False}),
    "bloom": ("Bloom", {"intermediate_size": 192}),
    "falcon": ("Falcon", {"ffn_hidden_size": 56}),
    "falcon-groups": (
        "Falcon",
        {"ffn_hidden_size": 80, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon-one-norm": (
        "Falcon",
        {
            "ffn_hidden_size": 80,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
        },
    ),
    # The number of heads is not a power of two, so the slopes of some have to be rounded.
    "falcon-alibi": (
        "Falcon",
        {
            "ffn_hidden_size": 80,
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
        },
    ),
    "exaone": ("Exaone", {}),
    "internlm3": ("InternLM3", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "iquest-coder": ("IQuestCoder", {"head_dim": 12}),
    "granite-windows": (
        "GraniteSWA",
        {
            "sliding_window": 9,
            "layer_rope_theta": [1e4, 0, 5e5],
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        {"attention_multiplier": 0.1, "logits_scaling": 0.5, "residual_multiplier": 0.7},
    ),
    "hyperclovax-input-norms": ("HyperCLOVAX", {"use_post_norm": False}),
    "vaultgemma": (
        "VaultGemma",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 10},
    ),
    "cwm": (
        "Cwm",
        {"head_dim": 16, "sliding_window": 9, "rope_parameters": LLAMA3, "bos_token_id": 1},
    ),
    "jais2": ("Jais2", {}),
    "gpt-neo": (
        "GPTNeo",
        {
            "num_hidden_layers": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 9,
            "intermediate_size": None,
        },
    ),
    "xglm": ("XGLM", {"ffn_dim": 80}),
    "mpt": ("Mpt", {"expansion_ratio": 4, "attn_config": {"clip_qkv": 0.5}}),
}
