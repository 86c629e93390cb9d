"""Write a transformers model with recurrent layers as the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter
from support.gguf import qwen4
from support.gguf.finish import finish
from support.gguf.quantizers import add_tensor
from support.gguf.tokenizer import add_tokenizer
from torch import Tensor

ARCHITECTURES = {
    "bailing_hybrid": "bailingmoe3",
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "falcon_mamba": "mamba",
    "granitemoehybrid": "granitehybrid",
    "jamba": "jamba",
    "kimi_linear": "kimi-linear",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
    "qwen4_exp_text": "qwen4exp",
}
KIMI = {"kimi_linear": -1, "bailing_hybrid": 1}
"""The signs of stored decays by model types with Kimi delta attention."""
MODULES = {
    r"model\.(embed_tokens|embeddings)": "token_embd",
    r"model\.(norm|norm_f|final_layernorm)": "output_norm",
    r"model\.embedding_norm": "token_embd_norm",
    r"lm_head": "output",
    r"self_attn\.([qkv])_conv1d": r"ssm_conv1d_\1",
    r"self_attn\.(forget_gate\.)?([fg]_[ab])_proj": r"ssm_\2",
    r"self_attn\.forget_gate\.f_proj": "ssm_f_a",
    r"self_attn\.g_proj": "ssm_g_a",
    r"self_attn\.b_proj": "ssm_beta",
    r"self_attn\.o_norm": "ssm_norm",
    r"self_attn\.forget_gate\.A_log": "ssm_a",
    r"self_attn\.forget_gate\.dt": "ssm_dt",
    r"self_attn\.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    r"self_attn\.kv_a_layernorm": "attn_kv_a_norm",
    r"self_attn\.([kv])_b_proj": r"attn_\1_b",
    r"(input_layernorm|operator_norm|norm)": "attn_norm",
    r"(post_attention_layernorm|pre_ff_layernorm|ffn_norm)": "ffn_norm",
    r"(self_attn|mixer)\.([qkv])_proj": r"attn_\2",
    r"(self_attn\.o_proj|self_attn\.out_proj|mixer\.o_proj)": "attn_output",
    r"self_attn\.([qk])_(layernorm|norm)": r"attn_\1_norm",
    r"linear_attn\.in_proj_qkv": "attn_qkv",
    r"linear_attn\.in_proj_z": "attn_gate",
    r"linear_attn\.in_proj_a": "ssm_alpha",
    r"linear_attn\.in_proj_b": "ssm_beta",
    r"linear_attn\.in_proj_ba": "ssm_ba",
    r"conv\.conv": "shortconv.conv",
    r"conv\.(in_proj|out_proj)": r"shortconv.\1",
    r"(mamba|mixer)\.x_proj": "ssm_x",
    r"(mamba|mixer)\.dt_proj": "ssm_dt",
    r"mamba\.(dt|b|c)_layernorm": r"ssm_\1_norm",
    r"(mamba|mixer|linear_attn)\.A_log": "ssm_a",
    r"(mamba|mixer|linear_attn)\.D": "ssm_d",
    r"(mamba|mixer|linear_attn)\.dt": "ssm_dt",
    r"(mamba|mixer|linear_attn)\.conv1d": "ssm_conv1d",
    r"(mamba|mixer|linear_attn)\.norm": "ssm_norm",
    r"(mamba|mixer|linear_attn)\.in_proj": "ssm_in",
    r"(mamba|mixer|linear_attn)\.out_proj": "ssm_out",
    r"(feed_forward|mlp)\.(w1|gate_proj)": "ffn_gate",
    r"(feed_forward|mixer|mlp)\.(w3|up_proj)": "ffn_up",
    r"(feed_forward|mixer|mlp)\.(w2|down_proj)": "ffn_down",
    r"(feed_forward\.gate|feed_forward\.router|block_sparse_moe\.router|mixer\.gate|mlp\.gate)": "ffn_gate_inp",
    r"mlp\.shared_expert\.(\w+)_proj": r"ffn_\1_shexp",
    r"mlp\.shared_expert_gate": "ffn_gate_inp_shexp",
    r"(feed_forward|block_sparse_moe|mixer|mlp)\.experts\.(\w+)_proj": r"ffn_\2_exps",
    r"shared_mlp\.(\w+)_proj": r"ffn_\1",
    r"(mixer|mlp)\.shared_experts\.(\w+)_proj": r"ffn_\2_shexp",
    r"mixer\.fc1_latent_proj": "ffn_latent_down",
    r"mixer\.fc2_latent_proj": "ffn_latent_up",
    r"(feed_forward|mixer|mlp)\..*(expert|correction)": "exp_probs_b",
    **qwen4.MODULES,
}


def prediction_name(name: str) -> str | None:
    """Return the name of a tensor of a layer for multi-token prediction, which other layers do not have."""
    match = re.fullmatch(
        r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|embed_tokens|shared_head\.\w+)\.weight", name
    )
    return match and f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}.weight"


def write_hybrid(
    path: Path,
    model: transformers.PreTrainedModel,
    tokenizer: Any = None,
    num_prediction_layers: int = 0,
    table_type: GGMLQuantizationType | None = None,
) -> Path:
    """Write `model` to `path` as F32, with a table of n-grams of type `table_type` if it is given, and return it.

    A `tokenizer` belongs to a model that reads images or audio.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    if architecture == "nemotron_h" and "moe" in config.layers_block_type:
        architecture = "nemotron_h_moe"
    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    add_hyperparameters(writer, config)
    if tokenizer is not None:
        if sections := config.rope_parameters.get("mrope_section"):
            writer.add_rope_dimension_sections([*sections, 0])
        add_tokenizer(writer, tokenizer, config.vocab_size, "gpt-2" if sections else "llama")
    if num_prediction_layers:
        writer.add_nextn_predict_layers(num_prediction_layers)
    for name, weight in tensors_of(model):
        # Two families have a head of their own, whatever the config says.
        has_own_head = config.model_type in ("nemotron_h", "kimi_linear")
        if name != "lm_head.weight" or has_own_head or not config.tie_word_embeddings:
            if weight.dtype == torch.int64:
                qwen4.add_constants(writer, name, weight)
                continue
            values = converted(name, weight.detach().float(), config)
            stored = gguf_name(name, config)
            is_table = stored == "per_layer_token_embd.weight"
            array = values.contiguous().numpy()
            add_tensor(writer, stored, array, table_type if is_table else None)
    if config.model_type == "qwen4_exp_text":
        qwen4.add_draft_layer(writer, config)
    return finish(writer)


def tensors_of(model: transformers.PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors, named as modules and parameters, with gate and up projections apart."""
    for name, weight in model.state_dict().items():
        name = name.replace("shared_mlp.output_linear", "shared_mlp.down_proj")
        name = name.replace("backbone.", "model.")
        if name.endswith("in_proj_qkvz.weight"):
            config = model.config
            key_size, num_key_heads = config.linear_key_head_dim, config.linear_num_key_heads
            value_size = config.linear_value_head_dim * config.linear_num_value_heads
            of_heads = weight.unflatten(0, (num_key_heads, -1))
            q, k, v, z = (
                x.flatten(0, 1)
                for x in of_heads.split([key_size] * 2 + [value_size // num_key_heads] * 2, 1)
            )
            yield name.replace("qkvz", "qkv"), torch.cat((q, k, v))
            yield name.replace("qkvz", "z"), z
            continue
        if "self_attn.conv1d" in name:
            for each, part in zip("qkv", weight.chunk(3), strict=True):
                yield name.replace("conv1d", f"{each}_conv1d"), part
            continue
        if "kv_b_proj" in name:
            of_heads = weight.unflatten(0, (model.config.num_attention_heads, -1))
            k, v = of_heads.split([model.config.qk_nope_head_dim, model.config.v_head_dim], 1)
            yield name.replace("kv_b_proj", "k_b_proj"), k.transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), v
            continue
        if ".index_qk_proj." in name:
            size = model.config.indexer_head_dim
            for each, part in zip("qk", (weight[:-size], weight[-size:]), strict=True):
                yield name.replace("index_qk", each), part
            continue
        name = re.sub(r"(dt|expert|correction)_bias$", r"\1.bias", name)
        if not name.endswith((".weight", ".bias", "A_log", ".D")):
            name = f"{name}.weight"
        if match := re.search(r"(input_linear|gate_up_proj)\.", name):
            gate, up = weight.chunk(2, weight.ndim - 2)
            yield name.replace(match[1], "gate_proj"), gate
            yield name.replace(match[1], "up_proj"), up
        else:
            yield name, weight


def gguf_name(name: str, config: Any) -> str:
    match = re.fullmatch(r"(model\.layers\.(\d+)\.)?(.*?)(\.weight|\.bias)?", name)
    assert match is not None
    if found := prediction_name(name):
        return found
    module = match[3]
    for pattern, new in MODULES.items():
        if renamed := re.fullmatch(pattern, module):
            found = renamed.expand(new)
            if module == "post_attention_layernorm" and "qwen" in config.model_type:
                found = "post_attention_norm"
            if module == "self_attn.g_proj":
                attends = config.layer_types[int(match[2])] == "full_attention"
                found = "attn_gate" if attends else "ssm_g_a"
            if "shared_mlp" in module and config.num_local_experts:
                found += "_shexp"
            # A table of n-grams is the only one of its file.
            has_number = match[1] and found != "per_layer_token_embd"
            layer = f"blk.{match[2]}." if has_number else ""
            return f"{layer}{found}{match[4] or ''}"
    raise AssertionError(name)


def converted(name: str, weight: Tensor, config: Any) -> Tensor:
    if "qwen" in config.model_type:
        return of_delta_net(name, weight, config)
    if config.model_type in KIMI:
        if "conv1d" in name:
            return weight.reshape(1, -1, 1, weight.shape[-1])
        if name.endswith("A_log"):
            return KIMI[config.model_type] * (weight if weight.ndim > 1 else weight[:, None]).exp()
        return weight
    if name.endswith("A_log"):
        return -weight.exp() if weight.ndim > 1 else -weight.exp().unsqueeze(-1)
    if name.endswith(".D"):
        return weight.unsqueeze(-1)
    if weight.ndim == 3 and "conv" in name:
        return weight.squeeze(1)
    if re.search(r"(mamba|mixer|linear_attn)\.norm\.", name):
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        return weight.reshape(groups, -1)
    if config.model_type in ("bamba", "granitemoehybrid") and re.search(r"\.[qk]_proj\.", name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
    if config.model_type == "falcon_h1":
        return weight * falcon_factor(name, config)
    return weight


def of_delta_net(name: str, weight: Tensor, config: Any) -> Tensor:
    is_norm = name.endswith("norm.weight") or ".ple.norm_" in name
    if is_norm and not name.endswith("linear_attn.norm.weight"):
        return weight + 1
    if name.endswith("shared_expert_gate.weight"):
        return weight.squeeze(0)
    if "conv1d" in name:
        weight = weight.squeeze(1)
    if name.endswith("A_log"):
        weight = -weight.exp()
    if ".linear_attn." not in name or config.model_type == "qwen3_next":
        return weight
    # Value heads that share a key head follow each other, the file has one of each key head first.
    key_heads, dim = config.linear_num_key_heads, config.linear_value_head_dim
    keys = 2 * key_heads * config.linear_key_head_dim

    def tiled(x: Tensor, size: int, axis: int = 0) -> Tensor:
        heads = x.unflatten(axis, (key_heads, -1, size))
        return heads.transpose(axis, axis + 1).flatten(axis, axis + 2)

    if "in_proj_qkv." in name or "conv1d" in name:
        return torch.cat((weight[:keys], tiled(weight[keys:], dim)))
    if "in_proj_z." in name:
        return tiled(weight, dim)
    if "out_proj." in name:
        return tiled(weight, dim, 1)
    if re.search(r"(in_proj_[ab]\.|A_log|dt\.bias)", name):
        return tiled(weight, 1)
    return weight


def falcon_factor(name: str, config: Any) -> Tensor | float:
    """The multiplier that the file has in a matrix."""
    if name.endswith("in_proj.weight"):
        states = config.mamba_n_groups * config.mamba_d_state
        sizes = [config.mamba_d_ssm] * 2 + [states] * 2 + [config.mamba_n_heads]
        factors = torch.tensor(config.ssm_multipliers) * config.ssm_in_multiplier
        return factors.repeat_interleave(torch.tensor(sizes)).unsqueeze(-1)
    return {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }.get(name.split(".")[-2], 1.0)


def add_hyperparameters(writer: GGUFWriter, config: Any) -> None:
    if config.model_type in ("mamba", "falcon_mamba", "mamba2"):
        writer.add_context_length(2**20)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        return (add_mamba2 if config.model_type == "mamba2" else add_mamba1)(writer, config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    count = len(kinds or range(config.num_hidden_layers))
    length = getattr(config, "max_position_embeddings", None) or config.model_max_length
    writer.add_context_length(length)
    writer.add_embedding_length(config.hidden_size)
    num_draft_layers = int(config.model_type == "qwen4_exp_text")
    writer.add_block_count(count + num_draft_layers)
    writer.add_head_count(heads)
    if config.model_type not in KIMI:
        writer.add_key_length(head_dim)
    is_nemotron = config.model_type == "nemotron_h"
    eps = "layer_norm_epsilon" if is_nemotron else "norm_eps"
    writer.add_layer_norm_rms_eps(getattr(config, eps, None) or config.rms_norm_eps)
    if config.model_type == "falcon_h1" or "qwen" in config.model_type:
        writer.add_head_count_kv(kv_heads)
    elif config.model_type in KIMI:
        writer.add_head_count_kv([int(kind == "full_attention") for kind in kinds])
    else:
        attending = ("attention", "full_attention")
        writer.add_head_count_kv([kv_heads if kind in attending else 0 for kind in kinds])
    if rope := getattr(config, "rope_parameters", None):
        writer.add_rope_freq_base(rope["rope_theta"])
    if config.model_type.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
        size = config.intermediate_size
        if getattr(config, "block_auto_adjust_ff_dim", False):
            size = size * 2 // 3
            size += -size % config.block_multiple_of
        writer.add_feed_forward_length(size)
    elif is_nemotron:
        writer.add_feed_forward_length(
            [config.intermediate_size if kind in ("mlp", "moe") else 0 for kind in kinds]
        )
    elif config.model_type in KIMI or not hasattr(config, "num_experts"):
        writer.add_feed_forward_length(config.intermediate_size)
    if config.model_type == "lfm2_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if config.model_type == "granitemoehybrid":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_rope_scaling_finetuned(False)
        if config.num_local_experts:
            writer.add_expert_count(config.num_local_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "bamba":
        factor = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(head_dim * factor))
        writer.add_rope_scaling_finetuned(True)
    if is_nemotron and "moe" in kinds:
        writer.add_expert_count(config.n_routed_experts)
        if blocks := getattr(config, "block_configs", None):
            for key, name in (
                ("used_count", "num_experts_per_tok"),
                ("feed_forward_length", "moe_intermediate_size"),
            ):
                values = [block.get(name, 0) for block in blocks]
                writer.add_array(f"{writer.arch}.expert_{key}", values)
        else:
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        if config.moe_latent_size:
            writer.add_moe_latent_size(config.moe_latent_size)
    if "qwen" in config.model_type:
        add_delta_net(writer, config)
    elif config.model_type in KIMI:
        add_kimi_linear(writer, config)
    elif config.model_type == "jamba":
        add_mamba1(writer, config)
    elif not config.model_type.startswith("lfm2"):
        add_mamba2(writer, config)


def add_delta_net(writer: GGUFWriter, config: Any) -> None:
    num_heads = config.linear_num_value_heads
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_inner_size(num_heads * config.linear_value_head_dim)
    writer.add_ssm_time_step_rank(num_heads)
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    if config.model_type == "qwen4_exp_text":
        qwen4.add_hyperparameters(writer, config)
        recurrent.append(False)
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    factor = config.rope_parameters.get("partial_rotary_factor", 0.25)
    writer.add_rope_dimension_count(int(config.head_dim * factor))
    if getattr(config, "num_experts", None):
        writer.add_expert_count(config.num_experts)
        if blocks := getattr(config, "block_configs", None):
            writer.add_expert_used_count([x.get("num_experts_per_tok", 0) for x in blocks])
            lengths = [x.get("moe_intermediate_size", 0) for x in blocks]
            writer.add_expert_feed_forward_length(lengths)
        else:
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def add_kimi_linear(writer: GGUFWriter, config: Any) -> None:
    rotary_dim = config.qk_rope_head_dim
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(rotary_dim)
    writer.add_key_length(config.kv_lora_rank + rotary_dim)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotary_dim)
    writer.add_value_length_mla(config.v_head_dim)
    if config.model_type == "bailing_hybrid":
        writer.add_bool(f"{writer.arch}.kda.safe_gate", config.kda_safe_gate)
        writer.add_expert_weights_norm(config.moe_renormalize)
        writer.add_float32(f"{writer.arch}.kda.gate_lower_bound", config.kda_lower_bound)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_token)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_expert_group_count(config.num_expert_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)


def add_mamba1(writer: GGUFWriter, config: Any) -> None:
    """Add the keys of Mamba layers, and of Jamba's experts."""
    if config.model_type == "jamba":
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_time_step_rank(config.mamba_dt_rank)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        return
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(int(config.time_step_rank))
    writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def add_mamba2(writer: GGUFWriter, config: Any) -> None:
    if config.model_type == "nemotron_h":
        num_heads, head_dim = config.mamba_num_heads, config.mamba_head_dim
        values = (config.conv_kernel, config.ssm_state_size, config.n_groups)
    elif config.model_type == "mamba2":
        num_heads, head_dim = config.num_heads, config.head_dim
        values = (config.conv_kernel, config.state_size, config.n_groups)
    else:
        num_heads, head_dim = config.mamba_n_heads, config.mamba_d_head
        values = (config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups)
    kernel, state_size, num_groups = values
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state_size)
    writer.add_ssm_group_count(num_groups)
    writer.add_ssm_inner_size(num_heads * head_dim)
    writer.add_ssm_time_step_rank(num_heads)
