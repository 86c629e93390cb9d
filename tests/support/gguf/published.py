"""Write published checkpoints of families without a class in transformers as llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.field_names import with_common_names
from gguf import (
    ExpertGatingFuncType,
    GGUFWriter,
    RopeScalingType,
    TensorNameMap,
    get_tensor_name_map,
)
from gguf.constants import MODEL_ARCH_NAMES
from safetensors.torch import load_file
from support.families.published.dense import HEADS, KV_HEADS, SIZES
from support.families.published.mixtures import with_k2_heads
from support.gguf.finish import finish
from support.gguf.writer import interleaved
from torch import Tensor

_WITH_LAYER_NORMS = ("codeshell", "jais", "orion")


def write_published(directory: Path, architecture: str) -> Path:
    """Write the checkpoint in `directory`, and return the file."""
    stored = json.loads((directory / "config.json").read_text())
    config = with_common_names(ConfigFields(stored, directory)).config
    layers = config["num_hidden_layers"]
    path = directory / "model.gguf"
    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_context_length(128)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    if architecture == "openelm":
        writer.add_feed_forward_length(SIZES)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
    elif architecture == "plamo2":
        attends = [i % 2 for i in range(layers)]
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count([each * config["num_attention_heads"] for each in attends])
        writer.add_head_count_kv([each * config["num_key_value_heads"] for each in attends])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_time_step_rank(config["mamba_num_heads"])
        writer.add_ssm_inner_size(config["mamba_num_heads"] * config["head_dim"])
        writer.add_ssm_group_count(0)
    else:
        heads = config["num_attention_heads"]
        experts_size = config.get("moe_ffn_hidden_size")
        writer.add_feed_forward_length(config.get("intermediate_size", experts_size))
        writer.add_head_count(heads)
        if architecture != "jais":
            kv_heads = config.get("num_query_groups", heads)
            writer.add_head_count_kv(config.get("num_key_value_heads", kv_heads))
    if architecture == "plm":
        writer.add_kv_lora_rank(config["kv_lora_rank"])
        writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["v_head_dim"])
        writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    elif (head_dim := config.get("head_dim")) is not None:
        writer.add_key_length(head_dim)
    if architecture == "smallthinker":
        writer.add_expert_count(config["moe_num_primary_experts"])
        writer.add_expert_used_count(config["moe_num_active_primary_experts"])
        writer.add_expert_feed_forward_length(config["moe_ffn_hidden_size"])
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_sliding_window(config["sliding_window_size"])
    if architecture == "grovemoe":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_chunk_feed_forward_length(config["parallel_expert_intermediate_size"])
        writer.add_experts_per_group(config["num_experts_per_group"])
        writer.add_expert_group_scale(config["expert_group_scale"])
    if architecture in ("arctic", "grok"):
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if architecture == "grok":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_router_logit_softcapping(config["router_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        writer.add_attn_output_scale(config["attn_output_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier_scale"])
        writer.add_logit_scale(config["output_multiplier_scale"])
    if architecture == "maple":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_rope_dimension_count(config["head_dim"] // 2)
        writer.add_sliding_window(config["sliding_window"])
        kinds = config["layer_types"]
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
        writer.add_array("maple.swiglu_clamp_exp", [7.0] * layers)
    if architecture == "k2-horizon":
        size = config["moe_intermediate_size"]
        writer.add_group_norm_groups(config["layernorm_num_groups"])
        writer.add_rope_dimension_count(config["rope_head_dim"])
        writer.add_rope_freq_base(2e4)
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(size)
        writer.add_expert_shared_count(config["num_shared_experts"])
        writer.add_expert_shared_feed_forward_length(size * config["num_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["router_scaling_factor"])
        writer.add_leading_dense_block_count(1)
    if architecture == "spark2_5":
        kinds = config["layer_types"]
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
        writer.add_rope_dimension_count(config["head_dim"] // 4)
        writer.add_uint32("spark2_5.rope.dimension_count_swa", config["head_dim"])
        writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(2e4)
    if architecture == "plamo3":
        writer.add_sliding_window(config["window_size"])
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_rope_freq_base_swa(config["rope_local_theta"])
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config["rope_scaling_factor"])
        writer.add_rope_scaling_orig_ctx_len(config["initial_context_length"])
    if architecture == "nanbeige":
        writer.add_uint32("nanbeige.num_loops", config["num_loops"])
        writer.add_bool("nanbeige.skip_loop_final_norm", config["skip_loop_final_norm"])
    eps = config.get("rms_norm_eps", 2.0**-23 if architecture == "talkie" else 1e-6)
    is_layer_norm = architecture in _WITH_LAYER_NORMS
    (writer.add_layer_norm_eps if is_layer_norm else writer.add_layer_norm_rms_eps)(eps)
    tensors = load_file(directory / "model.safetensors")
    if architecture == "talkie":
        writer.add_logit_scale(tensors.pop("lm_head_gain.w_g").item())
    if (change := _CHANGES.get(architecture)) is not None:
        tensors = change(tensors, dict(config))
    # The package gguf does not know these.
    known = {
        "k2-horizon": "glm4moe",
        "maple": "qwen3moe",
        "nanbeige": "llama",
        "spark2_5": "afmoe",
        "talkie": "llama",
    }.get(architecture, architecture)
    arch = next(arch for arch, text in MODEL_ARCH_NAMES.items() if text == known)
    # For Arctic, the package changes the names that all architectures share.
    shared = dict(TensorNameMap.block_mappings_cfg)
    names = get_tensor_name_map(arch, layers)
    TensorNameMap.block_mappings_cfg = shared
    for name, weight in tensors.items():
        found = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, weight.contiguous().numpy())
    return finish(writer)


def _with_own_projections(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Divide the matrix of queries, keys and values. The head is normed, which the file does not ask for."""
    changed = {}
    for name, weight in tensors.items():
        if "W_pack" not in name:
            changed[name] = weight / 3 if name == "lm_head.weight" else weight
            continue
        for kind, part in zip("qkv", weight.chunk(3), strict=True):
            changed[name.replace("W_pack", f"{kind}_proj")] = part
    return changed


def _interleaved(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Divide that matrix, and let neighboring elements of queries and keys be rotated together."""
    return _with_neighbors(_with_own_projections(tensors, config), config)


def _as_chameleon(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    changed = _with_neighbors(tensors, config)
    for name, weight in tensors.items():
        if "_norm." in name and weight.ndim == 2:
            changed[name] = interleaved(weight.flatten(), len(weight)).view(weight.shape)
    return changed


def _with_neighbors(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Let neighboring elements of queries and keys be rotated together."""
    changed = dict(tensors)
    for name, weight in tensors.items():
        for kind, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if f".{kind}_proj." in name:
                changed[name] = interleaved(weight, config[heads])
    return changed


def _as_talkie(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Rename tensors, and change the signs of rows, so that rotations have the usual direction."""
    names = {
        "attn.attn_query.weight": "attn_q.weight",
        "attn.attn_key.weight": "attn_k.weight",
        "attn.attn_value.weight": "attn_v.weight",
        "attn.attn_resid.weight": "attn_output.weight",
        "attn.head_gain.head_g": "attn_q_norm.weight",
        "mlp.mlp_gate.weight": "ffn_gate.weight",
        "mlp.mlp_linear.weight": "ffn_up.weight",
        "mlp.mlp_resid.weight": "ffn_down.weight",
        "attn_gain.a_g": "attn_output.scale",
        "mlp_gain.a_g": "ffn_down.scale",
        "embed_skip.a_g": "layer_output_scale.weight",
    }
    changed = {}
    for name, weight in tensors.items():
        if not (match := re.fullmatch(r"model\.blocks\.(\d+)\.(.*)", name)):
            changed[name.replace("model.embed.", "model.embed_tokens.")] = weight
            continue
        if match[2].startswith(("attn.attn_query", "attn.attn_key")):
            first, second = weight.unflatten(0, (config["num_attention_heads"], 2, -1)).unbind(1)
            weight = torch.stack((first, -second), 1).flatten(0, 2)
        changed[f"blk.{match[1]}.{names[match[2]]}"] = (
            weight.unsqueeze(-1) if "head_g" in name else weight
        )
    return changed


def _with_images(tensors: dict[str, Tensor], _config: dict[str, Any]) -> dict[str, Tensor]:
    """Add a matrix for images, and give the others the names of a CogVLM."""
    fused, renamed = "self_attn.language_expert_query_key_value", {}
    for name, weight in tensors.items():
        renamed[name.replace("self_attn.W_pack", fused)] = weight
    unused = "model.layers.0.mlp.vision_mlp.up_proj.weight"
    return renamed | {unused: torch.zeros(80, 48)}


def _with_factors(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Store matrices in the usual order, and multiply the embedding and the head by their factors."""
    changed = {name: x.T if x.ndim == 2 and ".h." in name else x for name, x in tensors.items()}
    embedding = changed["transformer.wte.weight"]
    width = config["mup_output_alpha"] * config["mup_width_scale"]
    return changed | {
        "transformer.wte.weight": embedding * config["mup_embeddings_scale"],
        "lm_head.weight": embedding * width,
    }


def _with_own_gates(tensors: dict[str, Tensor], _config: dict[str, Any]) -> dict[str, Tensor]:
    changed = {}
    for name, weight in tensors.items():
        if "proj_1" not in name:
            changed[name] = weight
            continue
        prefix = name.replace("transformer", "model").replace("ffn.proj_1.weight", "mlp")
        for part, rows in zip(("gate", "up"), weight.chunk(2), strict=True):
            changed[f"{prefix}.{part}_proj.weight"] = rows
    return changed


def _with_stacked_experts(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    changed: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        prefix, found, part = name.partition(".block_sparse_moe.experts.0.")
        if found:
            count = config["moe_num_primary_experts"]
            names = (f"{prefix}.block_sparse_moe.experts.{i}.{part}" for i in range(count))
            module = part.replace(".weight", "_proj.weight")
            changed[f"{prefix}.mlp.experts.{module}"] = torch.stack([tensors[x] for x in names])
        elif ".experts." not in name:
            changed[name.replace("block_sparse_moe.primary_router", "mlp.gate")] = weight
    return changed


def _with_stacked_arctics(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    changed = _with_stacked_groks(tensors, config)
    return {
        name.replace("block_sparse_moe.gate", "mlp.gate"): x
        for name, x in _with_neighbors(changed, config).items()
    }


def _with_stacked_groks(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    changed: dict[str, Tensor] = {}
    modules = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for name, weight in tensors.items():
        prefix, found, part = name.partition(".block_sparse_moe.experts.0.")
        if found:
            count = config["num_local_experts"]
            names = (f"{prefix}.block_sparse_moe.experts.{i}.{part}" for i in range(count))
            module = modules[part.removesuffix(".weight")]
            changed[f"{prefix}.mlp.experts.{module}.weight"] = torch.stack(
                [tensors[x] for x in names]
            )
        elif ".experts." not in name:
            changed[name] = weight
    return changed


def _with_stacked_maple(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    changed: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        prefix, found, part = name.partition(".experts.0.")
        if found:
            names = (f"{prefix}.experts.{i}.{part}" for i in range(config["num_experts"]))
            changed[f"{prefix}.experts.{part}"] = torch.stack([tensors[x] for x in names])
        elif ".experts." not in name:
            changed[name.replace("word_embeddings", "embed_tokens")] = weight
    return changed


def _with_stacked_horizons(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    pattern = r"model\.layers\.(\d+)\.mlp\.gate\.bias"
    return {
        re.sub(pattern, r"blk.\1.exp_probs_b.bias", name): weight
        for name, weight in _with_stacked_maple(with_k2_heads(tensors), config).items()
    }


def _with_stacked_groves(tensors: dict[str, Tensor], _config: dict[str, Any]) -> dict[str, Tensor]:
    changed: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        if (found := re.fullmatch(r"(.*experts)\.(\d+)\.(.*)", name)) is None:
            if "expert_bias" not in name:
                changed[name] = weight
        elif found[2] == "0":
            parts = [re.fullmatch(rf"{re.escape(found[1])}\.\d+\.{found[3]}", x) for x in tensors]
            names = sorted((each[0] for each in parts if each), key=lambda x: int(x.split(".")[-3]))
            changed[f"{found[1]}.{found[3]}"] = torch.stack([tensors[x] for x in names])
    return changed


def _with_known_names(tensors: dict[str, Tensor], _config: dict[str, Any]) -> dict[str, Tensor]:
    """Give the tensors of a Spark-X2.5 names in the file, or names that the package gguf knows."""
    names = (
        (r"model\.embedding\.", "model.embed_tokens."),
        (r"model\.layers\.(\d+)\.self_attn\.q_k_v_proj", r"blk.\1.attn_qkv"),
        (r"\.g_proj\.", ".gate_proj."),
        (r"\.out_proj\.", ".o_proj."),
    )
    changed = {}
    for name, weight in tensors.items():
        for pattern, known in names:
            name = re.sub(pattern, known, name)
        changed[name] = weight
    return changed


def _with_whole_norms(tensors: dict[str, Tensor], _config: dict[str, Any]) -> dict[str, Tensor]:
    offsets = {"post_mixer_norm": 1 / 5, "post_mlp_norm": 5**-1.5}
    return {
        name: weight + offsets.get(name.split(".")[-2], 1.0)
        if name.endswith("norm.weight")
        else weight
        for name, weight in tensors.items()
    }


def _as_mamba(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Give the vectors of Mamba layers the names of modules, and store decays instead of their logarithms."""
    changed = {}
    for name, weight in _with_whole_norms(tensors, config).items():
        stored = re.sub(r"\.([qk])_weight$", r".\1.weight", name)
        stored = re.sub(r"_norm_weight$", "_norm.weight", stored)
        stored = stored.replace(".dt_bias", ".dt_proj.bias")
        changed[stored] = -weight.exp() if name.endswith("A_log") else weight.squeeze()
    return changed


_CHANGES: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], dict[str, Tensor]]] = {
    "arctic": _with_stacked_arctics,
    "baichuan": _interleaved,
    "chameleon": _as_chameleon,
    "cogvlm": _with_images,
    "grok": _with_stacked_groks,
    "grovemoe": _with_stacked_groves,
    "jais": _with_factors,
    "k2-horizon": _with_stacked_horizons,
    "maple": _with_stacked_maple,
    "nanbeige": _with_neighbors,
    "openelm": _with_own_gates,
    "plamo2": _as_mamba,
    "plamo3": _with_whole_norms,
    "refact": _with_own_projections,
    "smallthinker": _with_stacked_experts,
    "talkie": _as_talkie,
    "spark2_5": _with_known_names,
}
"""Architecture -> the function that changes its tensors as the converter does."""
