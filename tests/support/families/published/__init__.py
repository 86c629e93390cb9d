"""Families that transformers has no class for, as models of another family in the form that they are published in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.families import make_reference
from support.families.dense import LLAMA3
from support.families.published import changes
from support.families.published.alice_ai import (
    ALICE_CONFIG,
    ALICE_NAMES,
    as_alice_ai,
    with_own_convolutions,
)
from support.families.published.dense import PUBLISHED_DENSE
from support.families.published.form import Published
from support.families.published.gigachat import GIGACHAT
from support.families.published.jet import JET
from support.families.published.kimi_k3 import K3_CONFIG, as_kimi_k3, with_towers
from support.families.published.mixtures import MIXTURES
from support.families.published.mixtures.deepseek_v4_1 import save_deepseek_v4_1
from support.families.published.motif import MOTIF
from support.families.published.phi3_small import PHI3_SMALL
from support.families.published.rwkv import RWKV, save_rwkv
from support.families.published.sala import SALA
from support.families.published.samba import PHI4_FLASH

_IN_LANGUAGE_MODEL = ((r"^(model\.|lm_head)", r"language_model.\1"),)
_THINKER = ("thinker_config", "text_config")
_QKV_IN_PACK = ((r"qkv_proj", "W_pack"),)
_INTERNLM2_NAMES = (
    (r"embed_tokens", "tok_embeddings"),
    (r"^lm_head", "output"),
    (r"self_attn\.o_proj", "attention.wo"),
    (r"self_attn\.wqkv", "attention.wqkv"),
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.up_proj", "feed_forward.w3"),
    (r"mlp\.down_proj", "feed_forward.w2"),
)
LING = {
    "intermediate_size": 80,
    "shared_intermediate_size": 80,
    "attention_multiplier": 8**-0.5,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "tie_word_embeddings": False,
}
PUBLISHED = {
    "AliceAI": Published(
        "qwen3-next",
        {
            "num_hidden_layers": 5,
            "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
            "norm_topk_prob": True,
        },
        ALICE_CONFIG,
        ALICE_NAMES,
        with_own_convolutions,
        prepare=as_alice_ai,
    ),
    "Bitnet": Published(
        "bitnet",
        {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True},
        {"model_type": "llama", "weight_bits": 1, "input_bits": 8},
        ((r"attn_sub_norm", "inner_attn_ln"), (r"ffn_sub_norm", "ffn_layernorm")),
        changes.before_rounding,
        prepare=changes.with_ternary_weights,
    ),
    "ChatGLM": Published(
        "glm",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {
            "model_type": "chatglm",
            "rms_norm_eps": None,
            "head_dim": None,
            "num_key_value_heads": None,
            "num_hidden_layers": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "vocab_size": None,
            "rope_parameters": None,
            "attention_bias": None,
            "layernorm_epsilon": 1.5625e-07,
            "kv_channels": 16,
            "multi_query_group_num": 2,
            "num_layers": 3,
            "ffn_hidden_size": 80,
            "seq_length": 256,
            "padded_vocab_size": 97,
            "rope_ratio": 50,
            "add_qkv_bias": True,
            "multi_query_attention": True,
        },
        (
            (r"model\.embed_tokens", "transformer.embedding.word_embeddings"),
            (r"model\.(layers|norm)", r"transformer.encoder.\1"),
            (r"encoder\.norm", "encoder.final_layernorm"),
            (r"lm_head", "transformer.output_layer"),
            (r"self_attn\.qkv_proj", "self_attention.query_key_value"),
            (r"self_attn\.o_proj", "self_attention.dense"),
            (r"mlp\.gate_up_proj", "mlp.dense_h_to_4h"),
            (r"mlp\.down_proj", "mlp.dense_4h_to_h"),
        ),
        changes.with_fused_qkv,
        suffix="Model",
    ),
    "BaiChuan": Published(
        "llama2",
        {"num_key_value_heads": 6},
        {"model_type": "baichuan"},
        _QKV_IN_PACK,
        changes.with_fused_qkv,
    ),
    "Baichuan": Published(
        "llama2",
        {"num_key_value_heads": 6},
        {
            "model_type": "baichuan",
            "z_loss_weight": 0,
            "max_position_embeddings": None,
            "model_max_length": 256,
        },
        _QKV_IN_PACK,
        changes.with_longer_head,
        prepare=changes.with_alibi,
    ),
    "DomynEdge": Published(
        "qwen3",
        {
            "num_hidden_layers": 5,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            "use_sliding_window": True,
            "sliding_window": 11,
        },
        {
            "model_type": "domynedge",
            "layer_types": None,
            "sliding_window": None,
            "position_layers": ["nope", "rope", "rope", "rope", "nope"],
            "window_sizes": [[-1, 0], [10, 0], [10, 0], [10, 0], [-1, 0]],
            "head_sizes": [24, 16, 16, 16, 24],
        },
        (
            (r"self_attn\.", "attention."),
            (r"mlp\.", "feedforward."),
            (r"post_attention_layernorm", "pre_feedforward_norm"),
            (r"input_layernorm", "pre_attention_norm"),
            (r"output_layernorm", "post_attention_norm"),
            (r"post_mlp_layernorm", "post_feedforward_norm"),
        ),
        changes.without_query_norms,
        prepare=changes.as_domyn_edge,
    ),
    "KORMo": Published(
        "llama2",
        {},
        {"model_type": "kormo"},
        (
            (r"input_layernorm", "pre_attention_layernorm"),
            (r"post_attention_layernorm", "pre_mlp_layernorm"),
        ),
    ),
    "InternLM": Published(
        "llama-biases",
        {"mlp_bias": False},
        {"model_type": "internlm", "attention_bias": None, "bias": True},
    ),
    "Orion": Published(
        "llama2",
        {"rms_norm_eps": 1e-5},
        {"model_type": "orion"},
        prepare=changes.with_layer_norms,
    ),
    "Ouro": Published(
        "glm4",
        {"partial_rotary_factor": 1.0},
        {"model_type": "ouro", "total_ut_steps": 3, "early_exit_threshold": 1.0},
        (
            (r"post_self_attn_layernorm", "input_layernorm_2"),
            (r"post_mlp_layernorm", "post_attention_layernorm_2"),
        ),
        changes.with_rotated_halves,
        prepare=changes.with_three_passes,
    ),
    "Rnj1": Published(
        "gemma3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        },
        {
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "chunked_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        },
        prepare=changes.with_chunks,
    ),
    "QWen": Published(
        "qwen2",
        {"num_key_value_heads": 6},
        {
            "model_type": "qwen",
            "intermediate_size": 160,
            "rms_norm_eps": None,
            "layer_norm_epsilon": 1e-6,
            "rope_parameters": None,
            "rotary_emb_base": 1e4,
            "kv_channels": 8,
            "seq_length": 128,
        },
        (
            (r"model\.embed_tokens", "transformer.wte"),
            (r"model\.layers", "transformer.h"),
            (r"model\.norm", "transformer.ln_f"),
            (r"input_layernorm", "ln_1"),
            (r"post_attention_layernorm", "ln_2"),
            (r"self_attn\.qkv_proj", "attn.c_attn"),
            (r"self_attn\.o_proj", "attn.c_proj"),
            (r"mlp\.up_proj", "mlp.w1"),
            (r"mlp\.gate_proj", "mlp.w2"),
            (r"mlp\.down_proj", "mlp.c_proj"),
        ),
        changes.with_fused_qkv,
        suffix="LMHeadModel",
    ),
    "MiniCPM": Published(
        "granite",
        {
            "residual_multiplier": 1.4 / 3**0.5,
            "logits_scaling": 3.0,
            "attention_multiplier": 8**-0.5,
        },
        {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16},
    ),
    "GigaChat35": GIGACHAT,
    "JetNemotron": JET,
    "MiniCPMSALA": SALA,
    "InternLM2": Published(
        "llama2",
        {},
        {"model_type": "internlm2", "bias": False},
        _INTERNLM2_NAMES,
        changes.with_grouped_rows,
    ),
    "InternLM2VE": Published(
        "llama2",
        {},
        {"model_type": "internlm2", "bias": False},
        _INTERNLM2_NAMES,
        changes.with_image_mlps,
    ),
    "DeciLM": Published(
        "llama3",
        {
            "num_hidden_layers": 5,
            "intermediate_size": 512,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3,
        },
        {
            "model_type": "nemotron-nas",
            "block_configs": changes.BLOCKS,
            "num_key_value_heads": None,
            "intermediate_size": None,
        },
        change=changes.without_unused_blocks,
        prepare=changes.disable_blocks,
    ),
    "Motif": MOTIF,
    "Phi3Small": PHI3_SMALL,
    "Phi4Flash": PHI4_FLASH,
    "Phi4MM": Published(
        "phi3-partial",
        {},
        {"model_type": "phi4mm"},
        ((r"qkv_proj\.weight", "qkv_proj.base_layer.weight"),),
        changes.with_adapters,
    ),
    "Qwen2_5Omni": Published(
        "qwen2",
        {"tie_word_embeddings": False},
        {"model_type": "qwen2_5_omni_text", "rope_parameters": changes.axes(2, 1, 1)},
        change=changes.with_talker,
        section=_THINKER,
        suffix="Model",
    ),
    "InternVLChat": Published(
        "llama2",
        {},
        {"model_type": "internlm2", "bias": False},
        (*_INTERNLM2_NAMES, (r"^(model\.|output)", r"language_model.\1")),
        changes.with_grouped_rows,
        ("llm_config",),
        "Model",
    ),
    "Apertus1p5": Published(
        "apertus-1.5",
        {},
        {},
        ((r"^model\.", "model.language_model."),),
        section=("text_config",),
    ),
    # A Granite without multipliers has the layers of the first Ling.
    "BailingMoe": Published(
        "granite-moe-shared",
        LING,
        {
            "model_type": "bailing_moe",
            "num_local_experts": None,
            "shared_intermediate_size": None,
            "num_experts": 4,
            "moe_intermediate_size": 80,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
        },
        (
            (r"embed_tokens", "word_embeddings"),
            (r"self_attn\.o_proj", "attention.dense"),
            (r"self_attn\.qkv_proj", "attention.query_key_value"),
            (r"block_sparse_moe\.router\.layer", "mlp.gate"),
            (r"block_sparse_moe\.", "mlp."),
            (r"shared_mlp\.", "mlp.shared_experts."),
        ),
        changes.with_ling_matrices,
    ),
    "KimiK3": Published(
        "kimi-linear",
        {
            "layer_types": [
                "linear_attention",
                "full_attention",
                *["linear_attention"] * 2,
                "full_attention",
            ],
            "num_hidden_layers": 5,
            "q_lora_rank": 20,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
        },
        K3_CONFIG | {"layer_types": None, "mlp_layer_types": None},
        (
            (r"self_attn\.g_b_proj", "self_attn.g_proj"),
            *_IN_LANGUAGE_MODEL,
        ),
        with_towers,
        ("text_config",),
        prepare=as_kimi_k3,
    ),
    "KimiVL": Published(
        "deepseek-v3", {}, {}, _IN_LANGUAGE_MODEL, changes.with_tower, ("text_config",)
    ),
    "MiniMaxM3Sparse": Published(
        "minimax-m3",
        # All blocks are chosen, so there is no need for the indexers.
        {"index_topk_blocks": 43},
        {
            "model_type": "minimax_m3",
            "hidden_act": "swigluoai",
            "rope_parameters": None,
            "rope_theta": 1e4,
            "rotary_dim": 8,
            "mlp_layer_types": None,
            "moe_layer_freq": [0, 1, 1],
            "layer_types": None,
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 12,
                "sparse_block_size": 6,
                "sparse_topk_blocks": 43,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1, 1],
            },
            **dict.fromkeys(
                (
                    "index_head_dim",
                    "index_block_size",
                    "index_topk_blocks",
                    "index_local_blocks",
                    "index_n_heads",
                )
            ),
        },
        (
            *_IN_LANGUAGE_MODEL,
            (r"self_attn\.indexer\.", "self_attn.index_"),
            (r"mlp\.gate\.e_score", "mlp.e_score"),
            (r"mlp\.(experts|gate\.|shared_experts|e_score)", r"block_sparse_moe.\1"),
        ),
        changes.with_next_token_layer,
        ("text_config",),
    ),
    "Qwen3OmniMoe": Published(
        "qwen3-moe-all",
        {},
        {"model_type": "qwen3_omni_moe_text", "rope_parameters": changes.axes(4, 2, 2)},
        change=changes.with_talker,
        section=_THINKER,
    ),
    **MIXTURES,
    **PUBLISHED_DENSE,
}


WRITTEN: dict[str, Callable[..., Any]] = {
    **{name: partial(save_rwkv, name) for name in RWKV},
    "DeepseekV41": save_deepseek_v4_1,
}
"""The functions that save models which are computed without transformers, by the name of a family."""


def save_published(name: str, path: Path, **others: Any) -> torch.nn.Module:
    """Save a random model of a family in the form that it is published in, and return one that is equal to it.

    `others` replace fields of the config.
    """
    if name in WRITTEN:
        model: torch.nn.Module = WRITTEN[name](path, **others)
        return model
    family = PUBLISHED[name]
    reference = make_reference(family.base, **{**family.differences, **others})
    if family.prepare is not None:
        family.prepare(reference)
    reference.save_pretrained(path)
    config = json.loads((path / "config.json").read_text()) | family.config
    config = {key: value for key, value in config.items() if value is not None}
    for section in reversed(family.section):
        config = {section: config}
    suffix = family.suffix or ("ForConditionalGeneration" if family.section else "ForCausalLM")
    config["architectures"] = [f"{name}{suffix}"]
    (path / "config.json").write_text(json.dumps(config))
    renamed = {}
    for stored, weight in family.change(load_file(path / "model.safetensors")).items():
        for pattern, replacement in family.names:
            stored = re.sub(pattern, replacement, stored)
        renamed[stored] = weight.contiguous()
    save_file(renamed, path / "model.safetensors")
    return reference
