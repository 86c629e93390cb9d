"""Write GGUF files of architectures that the package gguf does not know."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from support.gguf.finish import finish

_NAMES = (
    (r"^(transformer|model)\.(language_model\.)?", ""),
    (r"^(lm_head|score)\.", "output."),
    (r"^(embed_tokens|wte)\.", "token_embd."),
    (r"^(norm|norm_f)\.", "output_norm."),
    (r"^(layers|blocks)\.", "blk."),
    (r"\.norm_attn_norm\.norm_1\.", ".attn_norm."),
    (r"\.norm_attn_norm\.norm_2\.", ".attn_output_norm."),
    (r"\.norm_attn_norm\.attn\.Wqkv\.", ".attn_qkv."),
    (r"\.norm_attn_norm\.attn\.out_proj\.", ".attn_output."),
    (r"\.ffn\.router\.layer\.", ".ffn_gate_inp."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.([qkv])_proj\.", r".attn_\1."),
    (r"\.self_attn\.o_proj\.", ".attn_output."),
    (r"\.self_attn\.(query|key)_layernorm\.", lambda match: f".attn_{match[1][0]}_norm."),
    (r"\.mlp\.(gate|up|down)_proj\.", r".ffn_\1."),
    (r"\.mlp\.gate\.", ".ffn_gate_inp."),
    (r"\.mlp\.shared_experts\.(gate|up|down)_proj\.", r".ffn_\1_shexp."),
)
_MUSE_NAMES = (
    (r"\.pre_feedforward_layernorm\.", ".ffn_norm."),
    (r"\.post_feedforward_layernorm\.", ".post_ffw_norm."),
    (r"\.post_attention_layernorm\.", ".post_attention_norm."),
    (r"\.self_attn\.gate_proj\.", ".attn_gate."),
)
_ROWS_OF_DBRX = {"w1": "gate", "v1": "up", "w2": "down"}


def write_tensors(path: Path, model: Any, architecture: str, metadata: dict[str, Any]) -> Path:
    """Write a model to `path` and return it. The keys of `metadata` follow the architecture's name."""
    config, tensors = model.config.get_text_config(), model.state_dict()
    writer = GGUFWriter(path, architecture)
    common = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
    }
    for key, value in (common | metadata).items():
        kind = next(kind for kind in _ADD if isinstance(value, kind))
        getattr(writer, _ADD[kind])(f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        if ".vision_" in name:
            continue
        for key, values in _parts(name, tensor.float(), config).items():
            if key != "output.weight" or not config.tie_word_embeddings:
                writer.add_tensor(key, values.contiguous().numpy())
    return finish(writer)


_ADD = {
    bool: "add_bool",
    int: "add_uint32",
    float: "add_float32",
    str: "add_string",
    list: "add_array",
}
"""The writer's method for values of each type."""


def _parts(name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the file that one saved tensor becomes."""
    other, is_muse = name, config.model_type == "muse_glimmer_text"
    for pattern, replacement in (*(_MUSE_NAMES if is_muse else ()), *_NAMES):
        other = re.sub(pattern, replacement, other)
    if is_muse:
        return _parts_of_muse(other, tensor, config)
    if rows := re.fullmatch(r"(.*)\.ffn\.experts\.mlp\.(w1|v1|w2)", other):
        count = config.ffn_config.moe_num_experts
        experts = tensor.unflatten(0, (count, -1))
        part = _ROWS_OF_DBRX[rows[2]]
        matrices = experts.transpose(1, 2) if part == "down" else experts
        return {f"{rows[1]}.ffn_{part}_exps.weight": matrices}
    if stacked := re.fullmatch(r"(.*)\.mlp\.experts\.(gate_up|down)_proj", other):
        if stacked[2] == "down":
            return {f"{stacked[1]}.ffn_down_exps.weight": tensor}
        gate, up = tensor.chunk(2, 1)
        return {f"{stacked[1]}.ffn_gate_exps.weight": gate, f"{stacked[1]}.ffn_up_exps.weight": up}
    return {other: tensor}


def _parts_of_muse(key: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """Return tensors of a Muse Glimmer, with interleaved heads, 1 added to norms, and a factor as a norm."""
    if key.startswith("blk.") and key.endswith("norm.weight"):
        return {key: tensor + 1}
    if ".attn_q." not in key and ".attn_k." not in key:
        return {key: tensor}
    is_query = ".attn_q." in key
    count = config.num_attention_heads if is_query else config.num_key_value_heads
    halves = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2)
    factor = config.qk_scale_factor if is_query else 1.0
    norm = torch.full((config.head_dim,), factor)
    return {key: halves.reshape(tensor.shape), re.sub(r"(attn_[qk])", r"\1_norm", key): norm}
