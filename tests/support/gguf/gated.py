"""Write models with gates of attention, windows or inner norms as the GGUF files of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from engine.protocol.checkpoint.gguf import GGMLQuantizationType
from gguf import ExpertGatingFuncType, GGUFWriter
from numpy.typing import NDArray
from support.gguf.finish import finish
from torch import Tensor

ARCHITECTURES = {
    "bitnet": "bitnet",
    "granite_swa": "granite_swa",
    "granitemoe_swa": "granite_swa",
    "laguna": "laguna",
    "step3p7": "step35",
}
MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.g_proj": "attn_gate",
    "self_attn.o_proj": "attn_output",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction": "exp_probs_b",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "shared_mlp.input_linear": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}


I2_S: Any = GGMLQuantizationType.I2_S
"""A type that the gguf package lacks."""


def write_gated(path: Path, model: transformers.PreTrainedModel, published_as: str | None) -> Path:
    """Write `model` to `path` as F32 and return it."""
    config = model.config.get_text_config()
    config.allow_global_per_layer_attribute_access = True
    writer = GGUFWriter(path, published_as or ARCHITECTURES[model.config.model_type])
    writer.add_type("model")
    add_hyperparameters(writer, config)
    for name, weight in tensors_of(model):
        if (
            "vision" in name
            or "multi_modal" in name
            or (name == "lm_head.weight" and is_tied(config))
        ):
            continue
        values = weight.detach().float()
        if config.model_type == "step3p5" and name.endswith("norm.weight"):
            values = values + 1
        if "granite" in config.model_type and re.search(r"\.[qk]_proj\.", name):
            heads = config.num_attention_heads if ".q_" in name else config.num_key_value_heads
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if published_as == "bitnet-b1.58" and "_proj." in name:
            add_ternary(writer, gguf_name(name), values.numpy())
        else:
            writer.add_tensor(gguf_name(name), values.contiguous().numpy())
    return finish(writer)


def add_ternary(writer: GGUFWriter, name: str, values: NDArray[np.float32]) -> None:
    """Add a matrix as bitnet.cpp's type I2_S: each byte has elements 32 apart, and the scale comes last."""
    scale = np.abs(values).max()
    codes = (np.rint(values / scale) + 1).astype(np.uint8).reshape(-1, 4, 32)
    packed = codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]
    tail = np.zeros(8, np.float32)
    tail[0] = scale
    data = np.concatenate((packed.reshape(-1), tail.view(np.uint8)))
    writer.add_tensor_info(name, values.shape, values.dtype, data.nbytes, I2_S)
    writer.tensors[-1][name].tensor = data


def is_tied(config: Any) -> bool:
    return bool(config.tie_word_embeddings)


def tensors_of(model: transformers.PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors, with gate and up projections of experts apart where the converter splits them."""
    for name, weight in model.state_dict().items():
        name = name.replace("model.language_model.", "model.")
        if name.endswith("mlp.experts.gate_up_proj"):
            gate, up = weight.chunk(2, 1)
            yield name.replace("gate_up_proj", "gate_proj"), gate
            yield name.replace("gate_up_proj", "up_proj"), up
        else:
            yield name, weight


def gguf_name(name: str) -> str:
    match = re.fullmatch(r"(model\.layers\.(\d+)\.)?(.*?)([._](weight|bias))?", name)
    assert match is not None
    module, kind = match[3], match[5] or "weight"
    found = MODULES.get(module)
    if found is None:
        projection = re.fullmatch(
            r"(self_attn|mlp|mlp\.experts|mlp\.shared_experts)\.(\w+?)_(proj|norm)", module
        )
        assert projection is not None, name
        block, part, of = projection.groups()
        prefix, suffix = {
            "self_attn": ("attn", "_norm" if of == "norm" else ""),
            "mlp": ("ffn", ""),
            "mlp.experts": ("ffn", "_exps"),
            "mlp.shared_experts": ("ffn", "_shexp"),
        }[block]
        found = f"{prefix}_{part}{suffix}"
    return f"blk.{match[2]}.{found}.{kind}" if match[1] else f"{found}.{kind}"


def add_hyperparameters(writer: GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(head_counts(config))
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": 1e4}
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rotated = [
            int(head_dim * rope[f"{kind}_attention"]["partial_rotary_factor"])
            for kind in ("full", "sliding")
        ]
        rope = rope["full_attention"]
        if config.model_type == "laguna":
            writer.add_rope_dimension_count(rotated[0])
            writer.add_uint32(f"{writer.arch}.rope.dimension_count_swa", rotated[1])
    writer.add_rope_freq_base(rope["rope_theta"])
    if "granite" in config.model_type:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        rotates = [bool(theta) for theta in config.layer_rope_theta]
        writer.add_array(f"{writer.arch}.attention.rope_pattern", rotates)
    if config.model_type == "granitemoe_swa":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    elif config.model_type == "laguna":
        writer.add_expert_count(config.num_experts)
        add_experts(writer, config, config.shared_expert_intermediate_size)
        writer.add_expert_weights_scale(config.moe_routed_scaling_factor)
    elif config.model_type == "step3p5":
        writer.add_expert_count(config.n_routed_experts)
        add_experts(writer, config, config.share_expert_dim)
        writer.add_expert_weights_scale(config.moe_router_scaling_factor)
        writer.add_array(f"{writer.arch}.swiglu_clamp_exp", config.swiglu_limits)
        writer.add_array(f"{writer.arch}.swiglu_clamp_shexp", config.swiglu_limits_shared)


def head_counts(config: Any) -> int | list[int]:
    if config.model_type == "step3p5":
        counts = [config.num_attention_heads, config.num_sliding_attention_heads]
        return [counts[kind == "sliding_attention"] for kind in config.layer_types]
    return getattr(config, "num_attention_heads_per_layer", None) or config.num_attention_heads


def add_experts(writer: GGUFWriter, config: Any, shared_size: int) -> None:
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(shared_size)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
