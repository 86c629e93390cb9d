"""Llama models with differential attention."""

from __future__ import annotations

import math

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.layer_spec import Difference, LayerSpec
from ....layers.read_rope import read_rope
from ....layers.spec import ModelSpec
from ..common import Family, head_dim
from ..llama import llama


def initial_share(depth: int) -> float:
    """Return the initial share of what is subtracted in a layer."""
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


def _diffllama(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a DiffLlama, a Llama with differential attention (arXiv 2410.05258)."""
    kv_heads = fields.integer("num_key_value_heads", fields.integer("num_attention_heads"))
    if kv_heads % 2:
        raise fields.wrong("num_key_value_heads", "an even number", kv_heads)
    size, bias = head_dim(fields), fields.boolean("attention_bias", False)
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    rope, eps = read_rope(fields, size), fields.number("rms_norm_eps")
    return llama(
        fields,
        layers=tuple(
            LayerSpec(rope, difference=Difference(initial_share(i), eps))
            for i in range(fields.layer_count("num_hidden_layers"))
        ),
        head_dim=2 * size,
        attention_scale=size**-0.5,
        qkv_bias=bias,
        attention_output_bias=bias,
    )


def _motif(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Motif, whose differences have norms and may share what is subtracted (arXiv 2510.06949)."""
    fields.require_all(hidden_act="poly_norm", use_sliding_window=False)
    fields.require("kv_lora_rank", None, ": latent attention with differences is not supported")
    fields.require("k_ratio", 1)
    size, count = head_dim(fields), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", count)
    num_second = fields.integer("num_noise_heads", count // 2)
    if kv_heads % 2 or num_second % (kv_heads // 2):
        needed = f"an even number whose half divides {num_second}"
        raise fields.wrong("num_key_value_heads", needed, kv_heads)
    if count % num_second or count == num_second:
        raise fields.wrong("num_noise_heads", f"a divisor of {count} heads below them", num_second)
    sharing = count // num_second - 1
    bias = fields.boolean("use_bias", False)
    fields = fields.with_defaults(rms_norm_eps=1e-6).with_values(
        # The second heads are computed once for each first one.
        {"hidden_act": "silu", "num_attention_heads": 2 * sharing * num_second}
    )
    eps, rope = fields.number("attn_rms_norm_eps", 1e-5), read_rope(fields, size)
    return llama(
        fields,
        layers=tuple(
            LayerSpec(
                rope,
                difference=Difference(
                    initial_share(i - 1),
                    eps,
                    has_norm_weights=True,
                    are_neighbors=True,
                    num_sharing=sharing,
                ),
            )
            for i in range(fields.layer_count("num_hidden_layers"))
        ),
        head_dim=2 * size,
        attention_scale=size**-0.5,
        activation="poly_norm",
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
    )


FAMILIES = (
    Family("DiffLlamaForCausalLM", "diffllama", _diffllama),
    Family("MotifForCausalLM", "motif", _motif),
)
