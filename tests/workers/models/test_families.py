"""Every family gives the logits of transformers, however its tokens are split into steps."""

import json
import random
import re

import pytest
import torch
import transformers
from engine.protocol.checkpoint.gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from support.decoders import Runner, load_decoder, load_native_decoder
from support.gguf_writer import write_gguf
from support.quantized_checkpoints import FORMATS, quantize_directory

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

NUM_TOKENS = 60
SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
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
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GROUPS = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
}
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
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
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
LONG = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
CONFIGS = {
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
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 3,
            "laurel_rank": 6,
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
    "phi3-partial": (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.75,
            }
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    "olmo2": ("Olmo2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 11}),
    "mixtral-one": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "qwen2-moe": (
        "Qwen2Moe",
        EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen2-moe-all": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen3-moe-all": ("Qwen3Moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
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
    "ernie-moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "head_dim": 16},
    ),
    "ernie-moe-biases": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 4,
            "moe_k": 1,
            "head_dim": 16,
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
    "olmo-hybrid": (
        "OlmoHybrid",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_hidden_layers": 2,
            # Transformers saves the convolutions in equal parts.
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
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
    "olmo": ("Olmo", {}),
    "phi": ("Phi", {"num_key_value_heads": 6}),
    "phi-norms": ("Phi", {"qk_layernorm": True}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": (
        "StableLm",
        {"use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.25},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 11}),
    "gpt2": ("GPT2", {"n_inner": 80}),
    "gpt-bigcode": ("GPTBigCode", {"n_inner": 80}),
    "gpt-bigcode-heads": (
        "GPTBigCode",
        {"n_inner": 80, "multi_query": False, "scale_attn_weights": False},
    ),
    "gptj": ("GPTJ", {"n_inner": 80, "rotary_dim": 4}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt-neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "opt": ("OPT", {"ffn_dim": 80}),
    "bloom": ("Bloom", {"intermediate_size": 192}),
    "falcon": ("Falcon", {"ffn_hidden_size": 80}),
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
    "falcon-alibi": (
        "Falcon",
        {
            "ffn_hidden_size": 80,
            "num_attention_heads": 8,
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
        },
    ),
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
        LATENT | {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "minicpm3": ("MiniCPM3", LATENT),
}


WITH_TEXT_CONFIG = ("Gemma3n", "Gemma4", "Gemma4Unified")


def make_reference(name, **others):
    """Make a random transformers model in which every norm, bias and multiplier has an effect."""
    family, differences = CONFIGS[name]
    config_name = f"{family}Config" if family not in WITH_TEXT_CONFIG else f"{family}TextConfig"
    config = getattr(transformers, config_name)(**SMALL | differences | others)
    # Falcon's eager attention adds ALiBi twice.
    attention = "sdpa" if family == "Falcon" else "eager"
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, family.removesuffix("Text") + suffix)._from_config(
        config, attn_implementation=attention
    )
    for parameter_name, parameter in model.named_parameters():
        if re.search(r"norm|\bln_|bias$", parameter_name):
            torch.nn.init.normal_(parameter, 0.8, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0, 0.15)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, 0, 0.3)
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return model.eval()


NATIVE = [
    "apertus",
    "arcee",
    "bamba",
    "bloom",
    "cohere-norms",
    "deepseek-v2",
    "deepseek-v3",
    "falcon-alibi",
    "falcon-groups",
    "falcon-h1",
    "falcon-h1-without-norm",
    "gemma3n",
    "gemma4-dense",
    "gemma4-moe",
    "gemma4-shared",
    "gemma4-full",
    "glm4-moe-lite",
    "gpt-neox",
    "gpt2",
    "gptj",
    "granite-hybrid",
    "granite-hybrid-experts",
    "hunyuan-moe",
    "kimi-linear",
    "lfm2",
    "lfm2-moe",
    "llama4",
    "minicpm3",
    "ministral",
    "nanochat",
    "nemotron",
    "nemotron-h",
    "nemotron-h-latent-experts",
    "olmo-hybrid",
    "opt",
    "phi",
    "phi-moe",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-full",
    "qwen3.5-moe",
    "stablelm-parallel",
]
"""Families that are compared as native programs, too."""


@pytest.fixture(scope="module", params=[*CONFIGS, *(f"{name} native" for name in NATIVE)])
def models(request, tmp_path_factory):
    """Engine's decoder and the model of transformers."""
    name, *native = request.param.split()
    path = tmp_path_factory.mktemp(name)
    reference = make_reference(name)
    reference.save_pretrained(path)
    return (load_native_decoder if native else load_decoder)(path), reference


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
    "deepstack_visual_indexes": [],
    "fullatt_block_indexes": [],
}
MULTIMODAL = {
    "Mistral3": ("ministral3", {"head_dim": 16}),
    "Qwen2VL": ("qwen2_vl_text", {"rope_parameters": MROPE}),
    "Qwen2_5_VL": ("qwen2_5_vl_text", {"rope_parameters": MROPE}),
    "Qwen3VL": ("qwen3_vl_text", {"head_dim": 8, "rope_parameters": MROPE}),
}


@pytest.mark.parametrize("family", MULTIMODAL)
def test_text_logits_of_multimodal_models_equal_those_of_transformers(family, tmp_path):
    """The tensors of the vision tower are not read."""
    model_type, differences = MULTIMODAL[family]
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(
        text_config=SMALL | {"model_type": model_type} | differences,
        vision_config=VISION_SIZES | {"model_type": config_class().vision_config.model_type},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    reference = getattr(transformers, f"{family}ForConditionalGeneration")._from_config(
        config, attn_implementation="eager"
    )
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    reference.eval().save_pretrained(tmp_path)
    tokens = prompt(NUM_TOKENS)
    logits = Runner(load_decoder(tmp_path)).step({0: tokens})[0]
    assert_same(logits, expected_logits(reference, tokens))


def prompt(length, seed=0):
    return random.Random(seed).choices(range(SMALL["vocab_size"]), k=length)


def expected_logits(reference, tokens):
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].float()


def assert_same(logits, expected):
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_logits_of_experts_in_mxfp4(load, tmp_path):
    differences = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    reference = make_reference("gpt-oss", **differences)
    stored = {}
    for name, parameter in reference.named_parameters():
        if ".experts." not in name or name.endswith("_bias"):
            continue
        matrices = []
        for i, weight in enumerate(parameter.data):
            parts, values = FORMATS["mxfp4"].store(weight.T)
            parameter.data[i] = values.T
            matrices.append(parts)
        for part in matrices[0]:
            stored[f"{name}_{part}"] = torch.stack([parts[part] for parts in matrices])
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in stored}
    save_file(kept | stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = FORMATS["mxfp4"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = prompt(NUM_TOKENS)
    logits, expected = (
        Runner(load(tmp_path)).step({0: tokens})[0],
        expected_logits(reference, tokens),
    )
    if load is load_decoder:
        return assert_same(logits, expected)
    # The activations of experts are rounded to eight bits.
    assert torch.linalg.norm(logits - expected) < 0.02 * torch.linalg.norm(expected)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("fp8-blocks", 1e-5), ("compressed-fp8", 1e-5), ("compressed-nvfp4", 0.05)],
)
def test_native_logits_of_quantized_experts_are_those_of_their_values(name, tolerance, tmp_path):
    """Weights keep their values. Beside four-bit ones, activations are rounded to eight bits."""
    differences = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    differences["moe_intermediate_size"] = 64
    make_reference("qwen3-moe", **differences).save_pretrained(tmp_path)
    quantize_directory(tmp_path, name)
    tokens = prompt(NUM_TOKENS)
    logits, expected = (
        Runner(load(tmp_path)).step({0: tokens})[0] for load in (load_native_decoder, load_decoder)
    )
    assert torch.linalg.norm(logits - expected) <= tolerance * torch.linalg.norm(expected)


def test_native_logits_from_a_quantized_gguf_file_of_gemma_are_close(tmp_path):
    """Inputs of layers and their table, streams and shared keys, with rows of whole blocks."""
    for name in ("gemma3n", "gemma4-shared"):
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
        sizes["hidden_size_per_layer_input"] = 32
        sizes |= {"laurel_rank": 32} if name == "gemma3n" else {}
        reference = make_reference(name, **sizes)
        path = write_gguf(tmp_path / f"{name}.gguf", reference, ggml_type=GGMLQuantizationType.Q8_0)
        logits, expected = (
            Runner(load(path)).step({0: prompt(NUM_TOKENS)})[0]
            for load in (load_native_decoder, load_decoder)
        )
        assert torch.linalg.norm(logits - expected) < 0.05 * torch.linalg.norm(expected), name


@pytest.mark.parametrize("name", ["gemma3n", "gemma4-moe", "gemma4-shared"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_native_states_of_gemma_do_not_depend_on_the_batch(name, dtype, tmp_path):
    """In a cache of layers with different heads, no bits that a block had before may matter."""
    make_reference(name).save_pretrained(tmp_path)
    decoders = [
        load_native_decoder(
            tmp_path, dtype=torch.bfloat16, cache_dtype=dtype, block_size=16, num_threads=n
        )
        for n in (1, 2)
    ]
    prompts = [prompt(length, length) for length in (60, 33, 47)]
    expected = [Runner(decoders[0]).hidden({0: tokens}) for tokens in prompts]
    rng, runner = random.Random(2), Runner(decoders[1], len(prompts))
    for cache in runner.kv_caches if name != "gemma3n" else []:
        cache.view(torch.uint8).fill_(255)
    while unfinished := [i for i, p in enumerate(prompts) if runner.computed[i] < len(p)]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        starts = {i: runner.computed[i] for i in chosen}
        chunks = {
            i: prompts[i][start : start + rng.choice([1, 2, 25])] for i, start in starts.items()
        }
        states = runner.hidden(chunks).split([len(chunk) for chunk in chunks.values()])
        for (i, chunk), state in zip(chunks.items(), states, strict=True):
            assert torch.equal(state, expected[i][starts[i] : starts[i] + len(chunk)])


IN_GGUF = [
    "mixtral-one",
    "qwen2-moe-all",
    "qwen3-moe-all",
    "olmoe",
    "granite-moe",
    "granite-moe-shared",
    "glm4-moe",
    "minimax-m2",
    "dots1",
    "ernie-moe",
    "hunyuan-moe",
    "gpt-oss",
    "gemma",
    "arcee",
    "ernie4.5",
    "exaone4",
    "glm4",
    "seed-oss",
    "cohere",
    "cohere-norms",
    "cohere2",
    "nemotron",
    "phi",
    "stablelm",
    "starcoder2",
    "gpt2",
    "gpt-neox",
    "bloom",
    "falcon",
    "falcon-groups",
    "falcon-one-norm",
    "apertus",
    "glm",
    "gpt-bigcode",
    "olmo",
    "olmo3",
    "glm4-moe-lite",
    "minicpm3",
    "bamba",
    "falcon-h1-without-norm",
    "granite-hybrid",
    "lfm2",
    "lfm2-moe",
    "nemotron-h",
    "nemotron-h-latent-experts",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "gemma3n",
    "gemma4-dense",
    "gemma4-shared",
    "gemma4-moe",
]
YARN = LONG | {"mscale": 1.0}
DIFFERENCES_IN_GGUF = {
    "mistral3": {
        "rope_parameters": YARN
        | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16}
    },
    "deepseek-v2": {"rope_parameters": YARN, "q_lora_rank": 20},
    "deepseek-v3": {"rope_parameters": YARN, "attention_bias": False},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192},
    "phi-moe": {"router_jitter_noise": 0.01},
    "granite-hybrid-experts": {"position_embedding_type": "nope"},
    "falcon-h1": {"mamba_norm_before_gate": False},
    "kimi-linear": {"num_attention_heads": 3, "num_key_value_heads": 3},
}
"""Differences from `CONFIGS` where a GGUF file cannot express a setting."""


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_logits_from_a_gguf_file_of_an_earlier_converter(name, load, tmp_path):
    reference = make_reference(name, **DIFFERENCES_IN_GGUF[name])
    decoder = load(write_gguf(tmp_path / "m.gguf", reference, splits_heads=False))
    tokens = prompt(NUM_TOKENS)
    assert_same(Runner(decoder).step({0: tokens})[0], expected_logits(reference, tokens))


def test_a_gguf_file_without_rope_scaling_has_none(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    reference = make_reference("gpt-oss", rope_parameters=rope)
    decoder = load_decoder(write_gguf(tmp_path / "m.gguf", reference))
    tokens = prompt(NUM_TOKENS)
    assert_same(Runner(decoder).step({0: tokens})[0], expected_logits(reference, tokens))


NATIVE_IN_GGUF = [
    f"{name} native"
    for name in (
        "deepseek-v2",
        "deepseek-v3",
        "bamba",
        "gemma3n",
        "gemma4-moe",
        "gemma4-shared",
        "granite-hybrid",
        "kimi-linear",
        "lfm2",
        "minicpm3",
        "nemotron-h",
        "qwen3.5",
    )
]


@pytest.mark.parametrize("name", [*IN_GGUF, *DIFFERENCES_IN_GGUF, *NATIVE_IN_GGUF])
def test_logits_from_a_gguf_file_equal_those_of_transformers(name, tmp_path):
    name, *native = name.split()
    reference = make_reference(name, **DIFFERENCES_IN_GGUF.get(name, {}))
    path = write_gguf(tmp_path / "m.gguf", reference)
    decoder = (load_native_decoder if native else load_decoder)(path)
    tokens = prompt(NUM_TOKENS)
    assert_same(Runner(decoder).step({0: tokens})[0], expected_logits(reference, tokens))


def test_native_logits_from_a_quantized_gguf_file_with_latent_attention_are_close(tmp_path):
    """The matrices of each head stay quantized. No layer has experts, whose choice would amplify rounding."""
    ranks = {"q_lora_rank": 64, "kv_lora_rank": 64, "first_k_dense_replace": 3}
    sizes = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "hidden_size": 64}
    sizes |= {"intermediate_size": 96}
    reference = make_reference("deepseek-v3", **ranks | sizes | DIFFERENCES_IN_GGUF["deepseek-v3"])
    path = write_gguf(tmp_path / "m.gguf", reference, ggml_type=GGMLQuantizationType.Q8_0)
    logits, expected = (
        Runner(load(path)).step({0: prompt(NUM_TOKENS)})[0]
        for load in (load_native_decoder, load_decoder)
    )
    assert torch.linalg.norm(logits - expected) < 0.05 * torch.linalg.norm(expected)


def test_logits_of_one_prefill_equal_those_of_transformers(models):
    decoder, reference = models
    tokens = prompt(NUM_TOKENS)
    assert_same(Runner(decoder).step({0: tokens})[0], expected_logits(reference, tokens))


def test_logits_of_a_chunked_prefill_equal_those_of_transformers(models):
    decoder, reference = models
    tokens = prompt(NUM_TOKENS)
    rng, runner, parts = random.Random(0), Runner(decoder), []
    while sum(map(len, parts)) < NUM_TOKENS:
        start = sum(map(len, parts))
        parts.append(runner.step({0: tokens[start : start + rng.randint(1, 20)]})[0])
    assert_same(torch.cat(parts), expected_logits(reference, tokens))


def test_logits_of_mixed_batches_equal_those_of_transformers(models):
    """Requests join, leave, prefill and decode in the same steps, in varying order."""
    decoder, reference = models
    lengths = [60, 43, 57, 60, 35]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    rng, runner = random.Random(1), Runner(decoder, len(prompts))
    logits = [[] for _ in prompts]
    while any(runner.computed[i] < lengths[i] for i in range(len(prompts))):
        unfinished = [i for i in range(len(prompts)) if runner.computed[i] < lengths[i]]
        chunks = {}
        for i in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            size = rng.choice([1, 1, rng.randint(2, 25)])
            chunks[i] = prompts[i][runner.computed[i] : runner.computed[i] + size]
        for i, part in runner.step(chunks).items():
            logits[i].append(part)
    # The frequencies of LongRoPE depend on the length in transformers: only the longest compare.
    for i, length in enumerate(lengths):
        if length > 32:
            assert_same(torch.cat(logits[i]), expected_logits(reference, prompts[i]))


def test_greedy_text_and_its_logits_equal_those_of_transformers(models):
    """Each token is the likeliest for transformers after the tokens before it, so the whole text is its own."""
    decoder, reference = models
    tokens, runner = prompt(40), Runner(decoder)
    logits = [runner.step({0: tokens})[0]]
    for _ in range(40):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(runner.step({0: tokens[-1:]})[0])
    expected = expected_logits(reference, tokens)
    assert_same(torch.cat(logits), expected)
    assert tokens[40:] == expected[39:-1].argmax(-1).tolist()
