"""Write checkpoints of families with few files as llama.cpp's converter does, by the names of their tensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import ExpertGatingFuncType, GGUFWriter
from safetensors.torch import load_file
from support.gguf.finish import finish
from support.gguf.tokenizer import add_tokenizer
from support.gguf.writer import interleaved
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, Any]

_COMMON = (
    (r"^model\.embed_tokens\.", "token_embd."),
    (r"^model\.norm\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"^model\.layers\.", "blk."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"self_attn\.indexer\.wq_b\.", "indexer.attn_q_b."),
    (r"self_attn\.indexer\.wk\.", "indexer.attn_k."),
    (r"self_attn\.indexer\.weights_proj\.", "indexer.proj."),
    (r"self_attn\.indexer\.k_norm\.", "indexer.k_norm."),
    (r"self_attn\.(q|kv)_a_layernorm\.", r"attn_\1_a_norm."),
    (r"self_attn\.kv_a_proj_with_mqa\.", "attn_kv_a_mqa."),
    (r"self_attn\.o_proj\.", "attn_output."),
    (r"self_attn\.(\w+)_proj\.", r"attn_\1."),
    (r"mlp\.gate\.e_score_correction_bias$", "exp_probs_b.bias"),
    (r"mlp\.gate\.", "ffn_gate_inp."),
    (r"mlp\.experts\.(\w+)_proj\.", r"ffn_\1_exps."),
    (r"mlp\.shared_experts\.(\w+)_proj\.", r"ffn_\1_shexp."),
    (r"mlp\.(\w+)_proj\.", r"ffn_\1."),
)
"""Names of modules in most families, and the converter's. Those of a family are replaced before."""


LIKE_OTHER_LAYERS = {
    "shared_experts_intermediate_size": 24,
    "swa_q_lora_rank": 20,
    "swa_head_dim": 24,
    "n_group": 1,
    "topk_group": 1,
}
"""Fields that a GGUF file of a dots3-note can express: layers with common sizes, and one group of experts."""


def _unchanged(tensors: Tensors, _config: Config) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Form:
    """The form of a family's GGUF files.

    Attributes:
        add_keys: Adds the keys of the family.
        names: Regular expressions and their replacements in the names of tensors, before those of `_COMMON`.
        change: Changes the tensors, which have the names of the safetensors files.
    """

    add_keys: Callable[[GGUFWriter, Config], None]
    names: tuple[tuple[str, str], ...] = ()
    change: Callable[[Tensors, Config], Tensors] = _unchanged


def write_saved(directory: Path, architecture: str, tokenizer: Any = None) -> Path:
    """Write the checkpoint in `directory` as a GGUF file of an architecture, and return the file.

    The file has the content of `tokenizer`, if it is given.
    """
    form = FORMS[architecture]
    config = json.loads((directory / "config.json").read_text())
    config |= config.get("text_config", {})
    path = directory / "model.gguf"
    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    if theta := rope.get("rope_theta"):
        writer.add_rope_freq_base(theta)
    form.add_keys(writer, config)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, config["vocab_size"], "gpt-2")
    tensors = form.change(_with_stacked_experts(load_file(directory / "model.safetensors")), config)
    for name, weight in tensors.items():
        for pattern, replacement in (*form.names, *_COMMON):
            name = re.sub(pattern, replacement, name)
        writer.add_tensor(name, weight.float().contiguous().numpy())
    return finish(writer)


def _with_stacked_experts(tensors: Tensors) -> Tensors:
    """Stack the matrices of a layer's experts, with gates and products that are multiplied apart."""
    changed: Tensors = {}
    for name, weight in tensors.items():
        if match := re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up|down)_proj", name):
            halves = dict(zip(("gate", "up"), weight.chunk(2, 1), strict=True))
            for part, each in halves.items() if match[2] == "gate_up" else [("down", weight)]:
                changed[f"{match[1]}.{part}_proj.weight"] = each
        elif match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            if match[2] == "0":
                count = sum(bool(re.fullmatch(rf"{match[1]}\.\d+\.{match[3]}", x)) for x in tensors)
                parts = [tensors[f"{match[1]}.{i}.{match[3]}"] for i in range(count)]
                changed[f"{match[1]}.{match[3]}"] = torch.stack(parts)
        else:
            changed[name] = weight
    return changed


def _add_layers(writer: GGUFWriter, config: Config, kv_heads: int | None = None) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(kv_heads or config["num_key_value_heads"])


def _add_latent(writer: GGUFWriter, config: Config) -> None:
    rank, rotary_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotary_dim)
    writer.add_key_length(rank + rotary_dim)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary_dim)
    writer.add_value_length_mla(config["v_head_dim"])


def _add_experts(writer: GGUFWriter, config: Config) -> None:
    dense = config["mlp_layer_types"].count("dense")
    writer.add_leading_dense_block_count(config.get("first_k_dense_replace", dense))
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _add_indexers(writer: GGUFWriter, config: Config, types: list[bool]) -> None:
    prefix = f"{writer.arch}.attention.indexer"
    writer.add_uint32(f"{prefix}.head_count", config["index_n_heads"])
    writer.add_uint32(f"{prefix}.key_length", config["index_head_dim"])
    writer.add_uint32(f"{prefix}.top_k", config["index_topk"])
    writer.add_array(f"{prefix}.types", types)


def _with_split_heads(tensors: Tensors, config: Config) -> Tensors:
    """Split the matrices of keys and values by heads."""
    changed: Tensors = {}
    for name, weight in tensors.items():
        if "kv_b_proj" not in name:
            changed[name] = weight
            continue
        own = _of_layer(name, config)
        of_heads = weight.unflatten(0, (own["num_attention_heads"], -1))
        plain = own["qk_nope_head_dim"]
        changed[name.replace("kv_b", "k_b")] = of_heads[:, :plain].transpose(1, 2)
        changed[name.replace("kv_b", "v_b")] = of_heads[:, plain:]
    return changed


def _of_layer(name: str, config: Config) -> Config:
    """Return the config of the layer of a tensor."""
    number = re.search(r"\.layers\.(\d+)\.", name)
    assert number is not None, name
    return config | config.get("per_layer_config", {}).get(number[1], {})


def _neighbors(weight: Tensor, size: int, heads: int = 1) -> Tensor:
    """Order the last `size` elements of each head so that neighbors, not halves, are rotated together."""
    of_heads = weight.unflatten(0, (heads, -1))
    plain, rotated = of_heads[:, :-size], of_heads[:, -size:]
    rotated = rotated.unflatten(1, (2, size // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((plain, rotated), 1).flatten(0, 1)


def _add_hy4(writer: GGUFWriter, config: Config) -> None:
    _add_layers(writer, config, kv_heads=1)
    _add_latent(writer, config)
    _add_experts(writer, config)
    _add_indexers(writer, config, [kind == "full" for kind in config["indexer_types"]])
    count = config["num_hidden_layers"]
    prefix = f"{writer.arch}.hyper_connection"
    writer.add_array(f"{writer.arch}.swiglu_clamp_exp", [config["swiglu_limit"]] * count)
    writer.add_uint32(f"{prefix}.count", config["hc_mult"])
    writer.add_float32(f"{prefix}.epsilon", config["hc_eps"])
    writer.add_float32(f"{prefix}.magnitude", config["hc_magnitude"])


def _as_published_hy4(tensors: Tensors, config: Config) -> Tensors:
    """Let neighboring elements be rotated together, as in published weights and not as in transformers."""
    size, changed = config["qk_rope_head_dim"], _with_split_heads(tensors, config)
    heads = {"q_b_proj": config["num_attention_heads"], "wq_b": config["index_n_heads"]}
    for name, weight in changed.items():
        module = name.split(".")[-2]
        if module in ("q_b_proj", "kv_a_proj_with_mqa", "wq_b", "wk", "k_norm"):
            changed[name] = _neighbors(weight, size, heads.get(module, 1))
    return changed


def _add_dots3(writer: GGUFWriter, config: Config) -> None:
    is_local = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_block_count(len(is_local))
    local = config["per_layer_config"][str(is_local.index(True))]
    numbers = config["num_attention_heads"], local["num_attention_heads"]
    writer.add_head_count([numbers[x] for x in is_local])
    writer.add_head_count_kv(1)
    _add_latent(writer, config)
    _add_experts(writer, config)
    _add_indexers(writer, config, [not x for x in is_local])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["indexed_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(is_local)
    prefix = f"{writer.arch}.attention"
    writer.add_uint32(f"{prefix}.kv_lora_rank_swa", local["kv_lora_rank"])
    writer.add_uint32(f"{prefix}.key_length_mla_swa", local["head_dim"])
    writer.add_uint32(f"{prefix}.value_length_mla_swa", local["v_head_dim"])


def _with_factors_in_norms(tensors: Tensors, config: Config) -> Tensors:
    changed = _with_split_heads(tensors, config)
    for name, weight in changed.items():
        if match := re.search(r"\.(q|kv)_a_layernorm\.", name):
            rank = _of_layer(name, config)[f"{match[1]}_lora_rank"]
            changed[name] = weight * math.sqrt(config["hidden_size"] / rank)
    return changed


def _add_glm5_next(writer: GGUFWriter, config: Config) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([int(x != "linear_attention") for x in config["layer_types"]])
    _add_latent(writer, config)
    _add_experts(writer, config)
    _add_indexers(writer, config, [kind == "full" for kind in config["indexer_types"]])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    is_first_form = writer.arch == "glm5next"
    if is_first_form:
        writer.add_ssm_state_size(config["linear_head_dim"])
    else:
        writer.add_kda_head_dim(config["linear_head_dim"])
    key = "block_size" if is_first_form else "kpool"
    writer.add_uint32(f"{writer.arch}.attention.indexer.{key}", config["index_kpool"])
    limits = [config["swiglu_limit"]] * config["num_hidden_layers"]
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        writer.add_array(f"{writer.arch}.{name}", limits)
    prefix = f"{writer.arch}.hyper_connection"
    writer.add_uint32(f"{prefix}.count", config["hc_mult"])
    writer.add_uint32(f"{prefix}.sinkhorn_iterations", config["hc_sinkhorn_iters"])
    writer.add_float32(f"{prefix}.epsilon", config["hc_eps"])


def _with_decays(tensors: Tensors, config: Config) -> Tensors:
    text = {name: x for name, x in tensors.items() if ".visual." not in name}
    changed = _with_split_heads(text, config)
    for name, weight in changed.items():
        if name.endswith("A_log"):
            changed[name] = -weight.flatten().exp()
        elif "conv1d" in name:
            changed[name] = weight.reshape(1, weight.shape[0], 1, -1)
    return changed


def _names_of_glm5_next(gate: str, bias: str) -> tuple[tuple[str, str], ...]:
    return (
        (r"^model\.language_model\.", "model."),
        (r"self_attn\.([qkv])_conv1d\.", r"ssm_conv1d_\1."),
        (r"self_attn\.([fg]_[ab])_proj\.", r"ssm_\1."),
        (r"self_attn\.b_proj\.", "ssm_beta."),
        (r"self_attn\.A_log$", "ssm_a"),
        (r"self_attn\.dt_bias$", "ssm_dt.bias"),
        (r"self_attn\.o_norm\.", "ssm_norm."),
        (r"(\.hc_\w+)$", r"\1.weight"),
        (r"self_attn\.indexer\.index_kpool_compress_gate$", f"{gate}.weight"),
        (r"self_attn\.indexer\.index_kpool_compress_ape$", f"{bias}.weight"),
    )


def _add_minimax(writer: GGUFWriter, config: Config) -> None:
    _add_layers(writer, config)
    writer.add_key_length(config["head_dim"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_float32(f"{writer.arch}.residual_scale", config["mlp_alpha_factor"])
    writer.add_rope_dimension_count(config["head_dim"])
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)


def _without_decays(tensors: Tensors, _config: Config) -> Tensors:
    return {name: x for name, x in tensors.items() if not name.endswith(("_decay", "slope_rate"))}


def _add_hrm(writer: GGUFWriter, config: Config) -> None:
    count, slow, fast = config["num_layers_per_stack"], config["H_cycles"], config["L_cycles"]
    writer.add_block_count(count * slow * (fast + 1))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_embedding_scale(config["embedding_scale"])
    for key, value in (("layers_per_stack", count), ("h_cycles", slow), ("l_cycles", fast)):
        writer.add_uint32(f"{writer.arch}.hrm.{key}", value)


def _as_blocks(tensors: Tensors, config: Config) -> Tensors:
    """Number the layers of both stacks one after the other, and split their matrices."""
    changed: Tensors = {}
    for name, weight in tensors.items():
        match = re.fullmatch(r"model\.([LH])_module\.layers\.(\d+)\.(.+)", name)
        if match is None:
            changed[name] = weight
            continue
        number = int(match[2]) + config["num_layers_per_stack"] * (match[1] == "H")
        layer = f"model.layers.{number}"
        if match[3] == "attn.gqkv_proj.weight":
            for part, each in zip(["gate", "q", "k", "v"], weight.chunk(4), strict=True):
                changed[f"{layer}.self_attn.{part}_proj.weight"] = each
        elif match[3] == "mlp.gate_up_proj.weight":
            for part, each in zip(("gate", "up"), weight.chunk(2), strict=True):
                changed[f"{layer}.mlp.{part}_proj.weight"] = each
        else:
            changed[f"{layer}.{match[3].replace('attn.o', 'self_attn.o')}"] = weight
    return changed


def _add_ouro(writer: GGUFWriter, config: Config) -> None:
    _add_layers(writer, config)
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_uint32(f"{writer.arch}.num_loops", config["total_ut_steps"])
    writer.add_bool(f"{writer.arch}.skip_loop_final_norm", False)


def _with_pairs(tensors: Tensors, config: Config) -> Tensors:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name in [name for name in tensors if ".gate_up_proj." in name]:
        for part, each in zip(("gate", "up"), tensors.pop(name).chunk(2), strict=True):
            tensors[name.replace("gate_up", part)] = each
    return {
        name: interleaved(weight, heads[name.split(".")[-2]])
        if name.split(".")[-2] in heads
        else weight
        for name, weight in tensors.items()
        if "early_exit_gate" not in name
    }


FORMS = {
    "dots3note": Form(
        _add_dots3,
        (
            (r"self_attn\.k_rope_only_layernorm\.", "attn_k_norm."),
            (r"self_attn\.g_proj\.", "attn_gate."),
        ),
        _with_factors_in_norms,
    ),
    "glm5-next": Form(
        _add_glm5_next,
        _names_of_glm5_next("indexer.kpool_gate", "indexer.kpool_ape"),
        _with_decays,
    ),
    "glm5next": Form(
        _add_glm5_next,
        _names_of_glm5_next("indexer_compressor_gate", "indexer_compressor_ape"),
        _with_decays,
    ),
    "hrm_text": Form(_add_hrm, ((r"^model\.z_L_init$", "hrm.z_l_init"),), _as_blocks),
    "hy_v4": Form(
        _add_hy4,
        (
            (r"self_attn\.learnable_sink_param$", "attn_sinks.weight"),
            (r"self_attn\.linear_gate\.", "attn_gate."),
            (r"mlp\.(shared_experts\.)?linear_gate\.", r"mlp.\1gate_proj."),
            (r"hc_pre\.hc_(attn|mlp)_layer\.hc_(\w+)$", r"hc_\1_\2.weight"),
            (r"hc_mlp_", "hc_ffn_"),
            (r"^model\.hc_pre\.hc_head\.hc_head_(\w+)$", r"output_hc_\1.weight"),
        ),
        _as_published_hy4,
    ),
    "minimax-01": Form(
        _add_minimax,
        (
            (r"block_sparse_moe\.", "mlp."),
            (r"experts\.w1\.", "experts.gate_proj."),
            (r"experts\.w2\.", "experts.down_proj."),
            (r"experts\.w3\.", "experts.up_proj."),
            (r"self_attn\.norm\.", "attn_norm_2."),
            (r"self_attn\.output_gate\.", "attn_gate."),
            (r"self_attn\.out_proj\.", "attn_output."),
        ),
        _without_decays,
    ),
    "ouro": Form(
        _add_ouro,
        (
            (r"\.input_layernorm_2\.", ".post_attention_norm."),
            (r"\.post_attention_layernorm_2\.", ".post_ffw_norm."),
        ),
        _with_pairs,
    ),
}
"""Architecture -> the form of its files."""
