"""Translate the metadata of the Gemma family."""

import math
from typing import Any

import numpy as np

from ...errors import CheckpointError
from .declared import declared
from .fields import ModelFields, Translate
from .parts import MEAN, family, layer_types, read_pooling

# A divisor from which on a rotary frequency is effectively 0.
_NO_ROTATION = 1e20


def _gemma(fields: ModelFields, num_layers_27b: int) -> dict[str, Any]:
    # The 27B models use hidden_size / num_heads, the others the size of a query head. The metadata does not say which.
    is_27b = fields.num_layers == num_layers_27b
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            fields.integer("embedding_length") // fields.num_heads if is_27b else fields.head_dim
        ),
        "final_logit_softcapping": fields.optional_positive("final_logit_softcapping"),
    }


def _gemma2(fields: ModelFields) -> dict[str, Any]:
    return _gemma(fields, num_layers_27b=46) | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0) or None,
        "sliding_window": fields.integer("attention.sliding_window", 4096),
        "layer_types": layer_types(fields, default_period=2),
    }


def _gemma3(fields: ModelFields) -> dict[str, Any]:
    window = fields.optional_integer("attention.sliding_window")
    return _gemma(fields, num_layers_27b=62) | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": window,
        "layer_types": layer_types(fields, default_period=6 if window else 1),
        "rope_theta": fields.positive("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": fields.positive("rope.freq_base_swa", 10_000.0),
    }


def _gemma_embedding(fields: ModelFields) -> dict[str, Any]:
    tensors = {name: fields.gguf.tensors.get(f"{name}.weight") for name in ("dense_2", "dense_3")}
    return _gemma3(fields) | {
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
        "classifier_pooling": read_pooling(fields, MEAN),
        "dense_modules": {name: each.shape for name, each in tensors.items() if each is not None},
    }


def _gemma4(fields: ModelFields) -> dict[str, Any]:
    kinds = layer_types(fields, default_period=6)
    slides = [kind == "sliding_attention" for kind in kinds]
    num_shared = fields.integer("attention.shared_kv_layers", 0, minimum=0)
    num_own = fields.num_layers - num_shared
    sizes = fields.of_layers("feed_forward_length")
    kv_heads = fields.of_layers("attention.head_count_kv")
    num_local, num_global = (
        next((x for x, each in zip(kv_heads, slides, strict=True) if each is is_local), kv_heads[0])
        for is_local in (True, False)
    )
    divisors = fields.floats("rope_freqs.weight") if fields.has_tensor("rope_freqs.weight") else [1]
    config = {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] == 2 * sizes[0],
        "num_kv_shared_layers": num_shared,
        "num_key_value_heads": num_local,
        "num_global_key_value_heads": num_global,
        "head_dim": fields.integer("attention.key_length_swa", fields.head_dim),
        "global_head_dim": fields.head_dim,
        # Global layers without value weights use their keys as values.
        "attention_k_eq_v": any(
            not fields.has_tensor(f"blk.{i}.attn_v.weight") for i in range(max(num_own, 0))
        ),
        "final_logit_softcapping": fields.optional_positive("final_logit_softcapping"),
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": kinds,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                # The remaining pairs of a head have such large divisors that they do not rotate.
                "partial_rotary_factor": sum(x < _NO_ROTATION for x in divisors) / len(divisors),
                "rope_theta": fields.positive("rope.freq_base", 1_000_000.0),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": fields.positive("rope.freq_base_swa", 10_000.0),
            },
        },
        **_per_layer_inputs(fields),
    }
    if num_experts := fields.optional_integer("expert_count"):
        config |= {
            "enable_moe_block": True,
            "num_experts": num_experts,
            "top_k_experts": fields.integer("expert_used_count"),
            "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        }
    return config


def _gemma3n(fields: ModelFields) -> dict[str, Any]:
    laurel = fields.gguf.tensors.get("blk.0.laurel_l.weight")
    if laurel is None:
        raise CheckpointError(fields.gguf.path, "there is no matrix 'blk.0.laurel_l.weight'")
    # The file has quantiles of the normal distribution. Convert them to sparsities.
    key = "activation_sparsity_scale"
    quantiles = fields.config.get(fields.prefix + key, np.full(fields.num_layers, -np.inf))
    if not isinstance(quantiles, np.ndarray) or quantiles.dtype.kind != "f":
        raise fields.wrong(key, "a list of numbers", quantiles)
    return {
        "model_type": "gemma3n_text",
        "architectures": ["Gemma3nForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": fields.of_layers("feed_forward_length"),
        "activation_sparsity_pattern": [
            round(math.erfc(-x / math.sqrt(2)) / 2, 6) for x in quantiles.tolist()
        ],
        "num_kv_shared_layers": fields.integer("attention.shared_kv_layers", 0, minimum=0),
        "altup_num_inputs": fields.integer("altup.num_inputs", 4),
        "altup_active_idx": fields.integer("altup.active_idx", 0, minimum=0),
        "laurel_rank": laurel.shape[0],
        # Files without a soft cap come from the published models, which all have this one.
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0) or None,
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": layer_types(fields, default_period=5),
        "rope_theta": fields.positive("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": fields.positive("rope.freq_base_swa", 10_000.0),
        **_per_layer_inputs(fields),
    }


def _per_layer_inputs(fields: ModelFields) -> dict[str, Any]:
    size = fields.integer("embedding_length_per_layer_input", 0, minimum=0)
    table = fields.gguf.tensors.get("per_layer_token_embd.weight")
    if not size or table is None:
        return {"hidden_size_per_layer_input": size}
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": table.shape[0]}


GEMMA: dict[str, Translate] = {
    "gemma": declared("gemma", "GemmaForCausalLM", family, hidden_act="gelu_pytorch_tanh"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma-embedding": _gemma_embedding,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
}
