"""Writes a transformers model as the GGUF file that llama.cpp's converter would make of it."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from gguf.constants import GGML_QUANT_SIZES
from support.quantizers import quantize
from transformers import PreTrainedModel, PreTrainedTokenizerFast

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
}
GEMMA = ("gemma2", "gemma3")
INTERLEAVED = ("llama", "smollm3", "granite")
MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
POST_NORMED = {**MODULES, "post_attention_layernorm": "post_attention_norm"}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    ggml_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    ggml_types: Mapping[str, GGMLQuantizationType] | None = None,
    pre_tokenizer: str = "gpt-2",
) -> Path:
    """Write `model` to `path` and return it.

    Matrices are stored as `ggml_types` has it by the last part of their module's name, others as
    `ggml_type`, if their rows are whole blocks of it, else as F32; vectors are always F32.
    `pre_tokenizer` names the splitting rule of a byte-level BPE `tokenizer`.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    add_hyperparameters(writer, config, architecture)
    add_rope(writer, config)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, config.vocab_size, pre_tokenizer)
    check_expressible(config, architecture)
    is_tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and is_tied:
            continue
        values = converted(name, weight.detach().float(), config, architecture)
        stored = (ggml_types or {}).get(name.split(".")[-2], ggml_type)
        block_size, _ = GGML_QUANT_SIZES[stored]
        if values.ndim == 1 or values.shape[-1] % block_size:
            stored = GGMLQuantizationType.F32
        raw = quantize(values.numpy(), stored) if values.ndim == 2 else values.numpy()
        writer.add_tensor(gguf_name(name, architecture), raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check_expressible(config: Any, architecture: str) -> None:
    """The format leaves these to the architecture."""
    if architecture in GEMMA:
        period = 2 if architecture == "gemma2" else 6
        assert config.query_pre_attn_scalar == config.head_dim
        assert [kind == "full_attention" for kind in config.layer_types] == [
            (i + 1) % period == 0 for i in range(config.num_hidden_layers)
        ]


def gguf_name(name: str, architecture: str) -> str:
    modules = POST_NORMED if architecture in (*GEMMA, "olmo2") else MODULES
    module, kind = name.rsplit(".", 1)
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module):
        return f"blk.{match[1]}.{modules[match[2]]}.{kind}"
    return f"{modules[module]}.{kind}"


def converted(name: str, weight: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    if architecture in GEMMA and name.endswith("norm.weight"):
        return weight + 1
    if architecture in INTERLEAVED and ".q_proj." in name:
        return interleaved(weight, config.num_attention_heads)
    if architecture in INTERLEAVED and ".k_proj." in name:
        return interleaved(weight, config.num_key_value_heads)
    return weight


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Row i of the first half of each head before row i of the second half."""
    halves = weight.unflatten(0, (num_heads, 2, -1))
    return halves.transpose(1, 2).reshape(weight.shape)


def add_hyperparameters(writer: GGUFWriter, config: Any, architecture: str) -> None:
    head_dim = getattr(config, "head_dim", None)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim is not None and architecture not in ("granite", "phi3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture in INTERLEAVED:
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(
            head_dim or config.hidden_size // config.num_attention_heads
        )
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if architecture in GEMMA and config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture in (*GEMMA, "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


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


def add_tokenizer(
    writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, vocab_size: int, pre_tokenizer: str
) -> None:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    is_sentencepiece = model["type"] == "Unigram" or model.get("byte_fallback", False)
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for token, i in tokenizer.get_vocab().items():
        tokens[i], types[i] = token, TokenType.NORMAL
        if is_sentencepiece and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            types[i] = TokenType.BYTE
    for added in content["added_tokens"]:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        types[added["id"]] = kind
    if tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = TokenType.UNKNOWN
        writer.add_unk_token_id(tokenizer.unk_token_id)

    writer.add_tokenizer_model("llama" if is_sentencepiece else "gpt2")
    writer.add_tokenizer_pre("default" if is_sentencepiece else pre_tokenizer)
    writer.add_token_list(tokens)
    if is_sentencepiece:
        scores = sentencepiece_scores(model)
        writer.add_token_scores([scores.get(token, -10_000.0) for token in tokens])
    writer.add_token_types(types)
    if not is_sentencepiece:
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    else:
        first = tokenizer.tokenize("a")[0]
        writer.add_add_space_prefix(first.startswith("▁"))
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
        writer.add_add_bos_token(tokenizer("a").input_ids[0] == tokenizer.bos_token_id)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def sentencepiece_scores(model: dict[str, Any]) -> dict[str, float]:
    """A merge is the better the earlier it was learnt."""
    if model["type"] == "Unigram":
        return dict(model["vocab"])
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(model["merges"]):
        scores.setdefault(left + right, -float(rank))
    return scores
