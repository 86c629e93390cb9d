"""Write a transformers model as the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from support.gguf import gated, gemma, hybrid
from support.gguf.experts import LATENT, add_experts, add_latent
from support.gguf.finish import finish
from support.gguf.quantizers import quantize
from support.gguf.tokenizer import add_tokenizer

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "granite": "granite",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "minimax_m3_vl_text": "minimax-m3",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "minicpm3": "minicpm3",
    "phimoe": "phimoe",
    "llama4_text": "llama4",
    "afmoe": "afmoe",
    "deepseek_v32": "deepseek32",
    "exaone_moe": "exaone-moe",
    "glm_moe_dsa": "glm-dsa",
    "hy_v3": "hy_v3",
    "mellum": "mellum",
    "mistral4": "mistral4",
    "mimo_v2_flash": "mimo2",
    "sarvam_moe": "bailingmoe2",
    "youtu": "deepseek2",
}
DENSE = {
    "apertus": "apertus",
    "glm": "chatglm",
    "gpt_bigcode": "starcoder",
    "ministral3": "mistral3",
    "olmo": "olmo",
    "olmo3": "olmo2",
    "arcee": "arcee",
    "bloom": "bloom",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "ernie4_5": "ernie4_5",
    "exaone": "exaone",
    "exaone4": "exaone4",
    "falcon": "falcon",
    "gemma": "gemma",
    "glm4": "glm4",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "hunyuan_v1_dense": "hunyuan-dense",
    "jais2": "jais2",
    "mpt": "mpt",
    "nemotron": "nemotron",
    "phi": "phi2",
    "seed_oss": "seed_oss",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
"""Architectures of models whose tensors have the names in gguf's own table."""

GEMMA = ("gemma2", "gemma3")
INTERLEAVED = ("llama", "arcee", "smollm3", "granite", "granitemoe", "mistral3", "olmo")
MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.gate_proj": "attn_gate",
    **{f"self_attn.indexer.{x}": f"indexer.{x}" for x in ("q_proj", "k_proj", "q_norm", "k_norm")},
    "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
# Names of families that differ from those above.
RENAMED = {
    ".feed_forward.": ".mlp.",
    "block_sparse_moe.router.": "mlp.gate.",
    "mlp.gate.layer.": "mlp.gate.",
    "block_sparse_moe.experts.": "mlp.experts.",
    "mlp.shared_expert.": "mlp.shared_experts.",
    "mlp.shared_mlp.": "mlp.shared_experts.",
    ".shared_mlp.": ".mlp.shared_experts.",
    "shared_experts.input_linear": "shared_experts.gate_up_proj",
    "mlp.router.gate.": "mlp.gate.",
    "mlp.router.": "mlp.gate.",
    "mlp.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.gate.wg.": "mlp.gate.",
    "moe_statics.": "",
    "_proj_bias": "_proj.bias",
    "input_linear": "gate_up_proj",
    "output_linear": "down_proj",
}
POST_NORMED = {**MODULES, "post_attention_layernorm": "post_attention_norm"}


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerFast | None = None,
    *,
    ggml_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    ggml_types: Mapping[str, GGMLQuantizationType] | None = None,
    pre_tokenizer: str = "gpt-2",
    splits_heads: bool = True,
    splits_experts: bool = False,
    published_as: str | None = None,
    num_prediction_layers: int = 0,
) -> Path:
    """Write `model` to `path` and return it.

    Matrices are stored as `ggml_types` has it by the last part of their module's name, others as
    `ggml_type`, if their rows are whole blocks of it, else as F32; vectors are always F32.
    `pre_tokenizer` names the splitting rule of a byte-level BPE `tokenizer`. Without `splits_heads`
    a model with latent attention is written as by earlier converters, and with `splits_experts`, one with experts.
    `published_as` is the architecture of a family
    whose files are the same otherwise. The last `num_prediction_layers` layers are for multi-token prediction.
    """
    config = model.config
    if config.model_type in hybrid.ARCHITECTURES:
        return hybrid.write_hybrid(path, model, num_prediction_layers=num_prediction_layers)
    if config.model_type in gemma.ARCHITECTURES:
        return gemma.write_gemma(path, model)
    if config.model_type in gated.ARCHITECTURES:
        return gated.write_gated(path, model, published_as)
    is_dense = config.model_type in DENSE
    architecture = DENSE[config.model_type] if is_dense else ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, published_as or architecture)
    writer.add_type("model")
    if is_dense:
        add_dense_hyperparameters(writer, config)
        for name in ("alpha_p", "alpha_n", "beta", "eps"):
            values = [x.item() for key, x in model.state_dict().items() if f"act_fn.{name}" in key]
            if values:
                getattr(writer, f"add_xielu_{name}")(values)
    else:
        add_hyperparameters(writer, config, architecture)
        add_rope(writer, config)
        if num_prediction_layers:
            writer.add_nextn_predict_layers(num_prediction_layers)
        if hasattr(config, "kv_lora_rank"):
            add_latent(writer, config, splits_heads and architecture in LATENT)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, config.vocab_size, pre_tokenizer)
    check_expressible(config, architecture)
    is_tied = config.tie_word_embeddings
    for name, weight in tensors_of(model, splits_heads and architecture in LATENT):
        if (name == "lm_head.weight" and is_tied) or ".act_fn." in name:
            continue
        if is_dense:
            values = dense_values(name, weight.detach().float(), config, architecture)
            writer.add_tensor(dense_name(name, config, architecture), values.contiguous().numpy())
            continue
        # The converter leaves the heads of DeepSeek-OCR as they are.
        order = published_as if published_as == "deepseek2-ocr" else architecture
        values = converted(name, weight.detach().float(), config, order)
        stored = (ggml_types or {}).get(name.split(".")[-2], ggml_type)
        block_size, _ = GGML_QUANT_SIZES[stored]
        if values.ndim == 1 or values.shape[-1] % block_size:
            stored = GGMLQuantizationType.F32
        raw = values.numpy()
        if values.ndim > 1:
            raw = quantize(raw.reshape(-1, raw.shape[-1]), stored)
            raw = raw.reshape(*values.shape[:-1], -1)
        key = gguf_name(name, architecture)
        if not splits_experts or "_exps." not in key:
            writer.add_tensor(key, raw, raw_dtype=stored)
            continue
        for number, each in enumerate(raw):
            writer.add_tensor(key.replace("_exps", f".{number}"), each, raw_dtype=stored)
    return finish(writer)


def tensors_of(
    model: transformers.PreTrainedModel, splits_heads: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors, with gate and up projections of experts apart."""
    for name, weight in model.state_dict().items():
        if splits_heads and "kv_b_proj" in name:
            heads = weight.unflatten(0, (model.config.num_attention_heads, -1))
            keys, values = heads.split((model.config.qk_nope_head_dim, model.config.v_head_dim), 1)
            yield name.replace("kv_b", "k_b"), keys.transpose(1, 2).contiguous()
            yield name.replace("kv_b", "v_b"), values.contiguous()
            continue
        if model.config.model_type == "sarvam_moe" and re.search(r"\.[qkv]_proj\.", name):
            if ".q_proj." in name:
                parts = [model.state_dict()[name.replace(".q_", f".{x}_")] for x in "qkv"]
                yield name.replace("q_proj", "qkv_proj"), torch.cat(parts)
            continue
        if not re.search(r"\.(mlp|block_sparse_moe|shared_mlp|feed_forward)\.", name):
            yield name, weight
            continue
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if ".experts." in name and not name.endswith((".weight", ".bias")):
            name = f"{name}.weight"
            if model.config.model_type in ("gpt_oss", "llama4_text"):
                weight = weight.transpose(1, 2)
        if "gate_up_proj" in name and (
            "experts." in name or hasattr(model.config, "index_block_size")
        ):
            rows = weight.ndim - 1 if name.endswith(".bias") else weight.ndim - 2
            gate, up = weight.chunk(2, rows)
            if model.config.model_type == "gpt_oss":
                gate, up = weight.unflatten(rows, (-1, 2)).unbind(rows + 1)
            yield name.replace("gate_up_proj", "gate_proj"), gate.contiguous()
            yield name.replace("gate_up_proj", "up_proj"), up.contiguous()
        else:
            yield name, weight.contiguous()


def dense_name(name: str, config: Any, architecture: str) -> str:
    """Return the name by gguf's table, which has BLOOM's names without their prefix."""
    arch = next(arch for arch, text in MODEL_ARCH_NAMES.items() if text == architecture)
    if architecture == "bloom":
        name = name.removeprefix("transformer.")
    found = get_tensor_name_map(arch, config.num_hidden_layers).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return str(found)


def dense_values(name: str, weight: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    if architecture in ("gemma", "nemotron") and name.endswith("norm.weight"):
        return weight + 1
    if architecture == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight", name):
        return weight.T
    if "query_key_value" in name:
        # The queries of all heads come first, then the keys and the values.
        heads = config.num_attention_heads
        head_dim = config.hidden_size // heads
        groups = len(weight) // head_dim - heads
        groups //= 2
        queries, keys, values = weight.unflatten(0, (groups, -1, head_dim)).split(
            (heads // groups, 1, 1), 1
        )
        return torch.cat([x.flatten(0, 2) for x in (queries, keys, values)])
    if architecture in INTERLEAVED:
        return converted(name, weight, config, architecture)
    return weight


def add_dense_hyperparameters(writer: GGUFWriter, config: Any) -> None:
    """Add the keys of families that have few of their own."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    if config.model_type == "falcon":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    elif config.model_type in ("bloom", "gpt2", "gpt_neox"):
        kv_heads = heads
    elif config.model_type == "gpt_bigcode":
        kv_heads = 1
    inner = next(
        (getattr(config, n) for n in ("n_inner", "ffn_hidden_size") if hasattr(config, n)),
        getattr(config, "intermediate_size", 4 * config.hidden_size),
    )
    writer.add_context_length(getattr(config, "max_position_embeddings", 2048))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if hasattr(config, name):
            writer.add_layer_norm_eps(getattr(config, name))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type == "olmo":
        writer.add_layer_norm_eps(1e-5)
    if clip := getattr(getattr(config, "attn_config", config), "clip_qkv", None):
        writer.add_clamp_kqv(clip)
    if rope := getattr(config, "rope_parameters", None):
        rope = rope.get("full_attention", rope)
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope and rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope and rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if config.model_type == "olmo3":
        writer.add_sliding_window_pattern([x == "sliding_attention" for x in config.layer_types])
    if scale := getattr(config, "logit_scale", None):
        writer.add_logit_scale(scale)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if hasattr(config, "use_parallel_residual"):
        writer.add_parallel_residual(config.use_parallel_residual)


def check_expressible(config: Any, architecture: str) -> None:
    """Check values that the format leaves to the architecture."""
    if architecture in GEMMA:
        period = 2 if architecture == "gemma2" else 6
        assert config.query_pre_attn_scalar == config.head_dim
        assert [kind == "full_attention" for kind in config.layer_types] == [
            (i + 1) % period == 0 for i in range(config.num_hidden_layers)
        ]


def gguf_name(name: str, architecture: str) -> str:
    modules = POST_NORMED if architecture in (*GEMMA, "olmo2") else MODULES
    if match := re.fullmatch(r"model\.layers\.(\d+)\..*e_score_correction_bias", name):
        return f"blk.{match[1]}.exp_probs_b.bias"
    if match := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.sinks", name):
        return f"blk.{match[1]}.attn_sinks.weight"
    if architecture in ("afmoe", "glm4moe", "gpt-oss"):
        modules = POST_NORMED
    module, kind = name.rsplit(".", 1)
    if found := hybrid.prediction_name(name):
        return found
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module):
        return f"blk.{match[1]}.{modules[match[2]]}.{kind}"
    return f"{modules[module]}.{kind}"


def converted(name: str, weight: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    if architecture in (*GEMMA, "minimax-m3") and name.endswith("norm.weight"):
        return weight + 1
    if architecture in INTERLEAVED and ".q_proj." in name:
        return interleaved(weight, config.num_attention_heads)
    if architecture in INTERLEAVED and ".k_proj." in name:
        return interleaved(weight, config.num_key_value_heads)
    return weight


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Interleave the two halves of each head: row i of the first half, then row i of the second."""
    halves = weight.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).reshape(weight.shape)


def add_hyperparameters(writer: GGUFWriter, config: Any, architecture: str) -> None:
    head_dim = getattr(config, "head_dim", None)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    names = ("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size")
    writer.add_feed_forward_length(next(getattr(config, x) for x in names if hasattr(config, x)))
    writer.add_head_count(config.num_attention_heads)
    if architecture == "mimo2":
        add_windows_of_mimo(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    is_latent = hasattr(config, "kv_lora_rank")
    if head_dim is not None and architecture not in ("granite", "phi3") and not is_latent:
        writer.add_key_length(head_dim)
        writer.add_value_length(getattr(config, "v_head_dim", head_dim))
    if architecture in INTERLEAVED:
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(
            head_dim or config.hidden_size // config.num_attention_heads
        )
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if architecture in GEMMA and config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "mellum":
        theta = config.rope_parameters["sliding_attention"]["rope_theta"]
        writer.add_rope_freq_base_swa(theta)
    if architecture in ("exaone-moe", "mellum"):
        writer.add_sliding_window_pattern([x == "sliding_attention" for x in config.layer_types])
    if architecture in (*GEMMA, "afmoe", "exaone-moe", "mellum", "phi3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    if experts := next((x for name in names if (x := getattr(config, name, None))), None):
        add_experts(writer, config, experts)
    if architecture in ("bailingmoe2", "glm4moe", "mimo2", "minimax-m2", "minimax-m3"):
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    if architecture in ("granite", "granitemoe"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def add_windows_of_mimo(writer: GGUFWriter, config: Any) -> None:
    """Add the keys of layers with windows, which have twice as many key/value heads."""
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * (1 + x) for x in slides])
    writer.add_sliding_window_pattern(slides)
    writer.add_sliding_window(config.sliding_window - 1)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def add_rope(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if "full_attention" in rope:
        rope = rope["full_attention"]
    if config.model_type != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    if config.model_type == "phi3":
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        case "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
        case "longrope":
            original = config.original_max_position_embeddings
            scale = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(
                math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            )
            for length in ("long", "short"):
                factors = np.array(rope[f"{length}_factor"], np.float32)
                writer.add_tensor(f"rope_factors_{length}.weight", factors)


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        turns = original / (2 * math.pi * rope["rope_theta"] ** (i / head_dim))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)
