"""Translate the parts of the metadata that several architectures have in common."""

from typing import Any, Final

import numpy as np

from ...errors import CheckpointError
from .fields import ModelFields

MEAN: Final = 1
CLS: Final = 2
RANK: Final = 4
_POOLING: Final = {MEAN: "mean", CLS: "cls"}
"""llama.cpp's numbers for the kinds of pooling."""


def denoising(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of models that denoise answers. Llama.cpp's default is that logits are of the next position."""
    found: dict[str, Any] = {}
    for name, key in (
        ("mask_token_id", "tokenizer.ggml.mask_token_id"),
        ("predicts_next", "diffusion.shift_logits"),
    ):
        if (value := fields.config.get(key)) is not None:
            found[name] = value.item() if isinstance(value, np.generic) else value
    return found


def rope_scaling(fields: ModelFields) -> dict[str, Any] | None:
    """Return `rope_scaling`, or None if frequencies are not scaled.

    Raises:
        CheckpointError: The type of scaling is unknown.
    """
    original_length = fields.integer(
        "rope.scaling.original_context_length", fields.integer("context_length")
    )
    if fields.has_tensor("rope_freqs.weight"):
        divisors = fields.floats("rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original_length,
        }
    if fields.has_tensor("rope_factors_long.weight"):
        return {
            "rope_type": "longrope",
            "short_factor": fields.floats("rope_factors_short.weight"),
            "long_factor": fields.floats("rope_factors_long.weight"),
            "attention_factor": fields.positive("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original_length,
        }
    # The first files have the factor under another name. A factor without a type is linear.
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    kind = fields.text("rope.scaling.type", "linear")
    if kind == "linear" and factor not in (0.0, 1.0):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original_length,
        }
        for name, key in (
            ("attention_factor", "yarn_attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if (value := fields.optional_positive(f"rope.scaling.{key}")) is not None:
                scaling[name] = value
        return scaling
    if kind not in ("none", "linear"):
        raise CheckpointError(
            fields.gguf.path,
            f"the rope scaling type {kind!r} is not supported in GGUF files; use safetensors",
        )
    return None


def rotary_axes(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of rotary positions with three coordinates, which images need.

    Raises:
        CheckpointError: The file does not say how many frequencies each coordinate has.
    """
    name = "rope.dimension_sections"
    sections = fields.config.get(fields.prefix + name)
    if not isinstance(sections, np.ndarray) or len(sections) < 3 or sections.dtype.kind not in "iu":
        raise fields.wrong(name, "a list of at least three integers", sections)
    axes = [int(size) for size in sections[:3]]
    return {"rope_scaling": {"rope_type": "default", "mrope_section": axes}}


def optional_axes(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of rotary positions with three coordinates if the file has them."""
    has_axes = fields.config.get(fields.prefix + "rope.dimension_sections") is not None
    return rotary_axes(fields) if has_axes else {}


def yarn_weight(fields: ModelFields, unit: float) -> float | None:
    """Return YaRN's `mscale_all_dim`, by which log(factor) is weighted in the attention scale; stored times `unit`."""
    weight = fields.optional_positive("rope.scaling.yarn_log_multiplier")
    return None if weight is None else float(str(np.float32(weight / unit)))


def layer_types(fields: ModelFields, default_period: int) -> list[str]:
    """Return the attention type of each layer: full for every ``period``-th layer, sliding for the others."""
    key = "attention.sliding_window_pattern"
    pattern = fields.config.get(fields.prefix + key)
    if isinstance(pattern, np.ndarray):
        sliding = pattern.astype(bool).tolist()
    else:
        period = fields.integer(key, default_period)
        sliding = [bool((i + 1) % period) for i in range(fields.num_layers)]
    return ["sliding_attention" if x else "full_attention" for x in sliding]


def family(fields: ModelFields) -> dict[str, Any]:
    """Return the fields that many families have. Only part of a head may be rotated."""
    has_biases = fields.has_tensor("blk.0.attn_output.bias")
    return {
        **partial_rotary(fields),
        "use_bias": has_biases,
        "bias": has_biases,
        "logit_scale": fields.positive("logit_scale", 1.0),
        "sliding_window": fields.optional_integer("attention.sliding_window"),
    }


def expert_fields(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of a mixture of experts, which have the same names in most families."""
    size = fields.optional_integer("expert_feed_forward_length")
    if size is None:
        size = fields.integer("feed_forward_length")
    num_shared = fields.integer("expert_shared_count", 0, minimum=0)
    shared = fields.integer("expert_shared_feed_forward_length", num_shared * size, minimum=0)
    return {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": size,
        "n_shared_experts": shared // size,
        "shared_expert_intermediate_size": shared,
        "shared_intermediate_size": shared,
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0, minimum=0),
        "n_group": fields.integer("expert_group_count", 1),
        "topk_group": fields.integer("expert_group_used_count", 1),
        "norm_topk_prob": fields.boolean("expert_weights_norm", False),
        "routed_scaling_factor": fields.positive("expert_weights_scale", 1.0),
    }


def layer_counts(fields: ModelFields) -> dict[str, int]:
    """Return the number of decoder layers, and of the multi-token-prediction layers after them."""
    num_further = fields.integer("nextn_predict_layers", 0, minimum=0)
    return {
        "num_hidden_layers": fields.num_layers - num_further,
        "num_nextn_predict_layers": num_further,
    }


def rotary_dim(fields: ModelFields) -> int:
    """Return the number of a head's elements that are rotated."""
    return fields.integer("rope.dimension_count", fields.head_dim)


def ropes_by_type(
    fields: ModelFields, rotated: int, scaling: dict[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Return `rope_parameters` of a model whose layers with a window have their own rotation.

    Args:
        fields: The model's metadata.
        rotated: The number of elements that layers without a window rotate.
        scaling: The scaling of their frequencies.
    """
    theta = fields.positive("rope.freq_base", 10_000.0)
    local = fields.integer("rope.dimension_count_swa", rotary_dim(fields))
    return {
        "full_attention": (scaling or {"rope_type": "default"})
        | {"rope_theta": theta, "partial_rotary_factor": rotated / fields.head_dim},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": fields.positive("rope.freq_base_swa", theta),
            "partial_rotary_factor": local / fields.head_dim,
        },
    }


def partial_rotary(fields: ModelFields) -> dict[str, float]:
    """Return the fraction of a head's elements that are rotated."""
    return {"partial_rotary_factor": rotary_dim(fields) / fields.head_dim}


def gate_limits(fields: ModelFields, name: str) -> list[float] | None:
    """Return each layer's limit of activated gates, 0 for none; None if the file has no limits."""
    values = fields.get(name)
    if values is None:
        return None
    limits = np.atleast_1d(values)
    if limits.size == 1:
        limits = limits.repeat(fields.num_layers)
    if limits.dtype.kind not in "fiu" or len(limits) != fields.num_layers:
        raise fields.wrong(name, "a list with a number for each layer", limits.tolist())
    return [float(str(np.float32(limit))) for limit in limits]


def gate_limit(fields: ModelFields) -> float:
    """Return the limit of activated gates of experts, which is the same in all layers; 0 for none.

    Raises:
        CheckpointError: Layers, or shared and other experts, have different limits.
    """
    limits = set(gate_limits(fields, "swiglu_clamp_exp") or [0.0])
    limits |= set(gate_limits(fields, "swiglu_clamp_shexp") or limits)
    if len(limits) > 1:
        raise fields.wrong("swiglu_clamp_exp", "equal for all layers", sorted(limits))
    return limits.pop()


def indexers(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of the indexers of sparse latent attention (DeepSeek-V3.2)."""
    types = "attention.indexer.types"
    kinds = None
    if fields.get(types) is not None:
        count = layer_counts(fields)["num_hidden_layers"]
        found = fields.of_layers(types, count)
        kinds = ["full" if has_indexer else "shared" for has_indexer in found]
    return {
        "index_n_heads": fields.integer("attention.indexer.head_count"),
        "index_head_dim": fields.integer("attention.indexer.key_length"),
        "index_topk": fields.integer("attention.indexer.top_k"),
        "indexer_types": kinds,
    }


def latent_attention(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of multi-head latent attention (DeepSeek-V2). Without rotations, all elements are plain."""
    rotary_dim = fields.integer("rope.dimension_count", minimum=0)
    # In newer files, the plain keys describe the latent vector that all heads share.
    key_length = fields.integer(
        "attention.key_length_mla", fields.integer("attention.key_length"), minimum=rotary_dim + 1
    )
    default = fields.integer("embedding_length") // fields.num_heads
    value_length = fields.integer("attention.value_length", default)
    return {
        "q_lora_rank": fields.optional_integer("attention.q_lora_rank"),
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_length - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": fields.integer("attention.value_length_mla", value_length),
        "attention_bias": fields.has_tensor("blk.0.attn_kv_a_mqa.bias"),
    }


def granite(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of dense Granite models. The other Granite models have them too."""
    return {
        "attention_multiplier": fields.positive("attention.scale", fields.head_dim**-0.5),
        "embedding_multiplier": fields.positive("embedding_scale", 1.0),
        "residual_multiplier": fields.positive("residual_scale", 1.0),
        "logits_scaling": fields.positive("logit_scale", 1.0),
    }


def head_pooling(fields: ModelFields) -> str:
    """Return the pooling before a classification head, "mean" or "cls", which means the last token of a decoder."""
    default = MEAN if fields.prefix == "modern-bert." else CLS
    return _POOLING.get(fields.integer("classifier.pooling_type", default, minimum=0), "cls")


def read_pooling(fields: ModelFields, default: int) -> str:
    """Return the pooling of an encoder, "mean" or "cls". `default` is llama.cpp's number for it."""
    pooling = fields.integer("pooling_type", default, minimum=0)
    if pooling == RANK:
        # The pooling before the classification head is in a field of its own.
        pooling = default
    if pooling not in _POOLING:
        raise fields.wrong("pooling_type", "1 (mean), 2 (cls) or 4 (rank)", pooling)
    return _POOLING[pooling]
