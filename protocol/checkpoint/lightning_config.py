"""Read the lightning attention that a config describes."""

from __future__ import annotations

from typing import Final

import msgspec

from .config_fields import ConfigFields
from .recurrent_layers import LightningAttention

LING_2_5: Final = "BailingMoeV2_5ForCausalLM"
"""The architecture of Ling 2.5 and 2.6 and Ring 2.5, whose model type is that of Ling 3."""


def read_lightning_attention(fields: ConfigFields) -> LightningAttention:
    """Return the lightning attention of a MiniMax-Text-01."""
    num_heads = fields.integer("num_attention_heads")
    default = fields.integer("hidden_size") // num_heads
    return LightningAttention(num_heads, fields.integer("head_dim", default))


def read_rotated_lightning(fields: ConfigFields) -> LightningAttention:
    """Return the lightning attention of a Ling 2.5, with rotated queries and keys.

    Raises:
        CheckpointError: A field is invalid, or a feature is not supported.
    """
    fields.require_all(
        linear_rope=True,
        linear_silu=False,
        use_linear_silu=False,
        use_qkv_bias=False,
        use_bias=False,
    )
    layer = read_lightning_attention(fields)
    num_groups = fields.integer("group_norm_size", 8)
    for name, number, divisor in (
        ("group_norm_size", num_groups, layer.num_heads),
        ("num_attention_heads", layer.num_heads, 1 << layer.num_heads.bit_length()),
    ):
        if divisor % number:
            needed = "a power of two" if divisor > number else f"a divisor of {divisor} heads"
            raise fields.wrong(name, needed, number)
    return msgspec.structs.replace(
        layer,
        norm_groups=num_groups,
        is_rotated=True,
        norms_heads=fields.boolean("use_qk_norm", False),
    )


def read_minicpm_lightning(fields: ConfigFields) -> LightningAttention:
    """Return the lightning attention of a MiniCPM-SALA, with rotated queries and keys and a norm of all heads.

    Raises:
        CheckpointError: A field is invalid, or a feature is not supported.
    """
    heads = fields.integer("lightning_nh", fields.integer("num_attention_heads"))
    fields.require_all(
        lightning_nkv=heads,
        lightning_scale="1/sqrt(d)",
        attention_bias=False,
        lightning_use_rope=True,
        use_output_gate=True,
        use_output_norm=True,
    )
    if heads & heads - 1:
        raise fields.wrong("lightning_nh", "a power of two", heads)
    default = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    return LightningAttention(
        heads,
        fields.integer("lightning_head_dim", fields.integer("head_dim", default)),
        is_rotated=True,
        norms_heads=fields.boolean("qk_norm", True),
        has_separate_projections=True,
        has_layer_decays=fields.boolean("lightning_layerwise_decay", False),
    )
