"""Read the recurrent layers of RWKV models from a config of flash-linear-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .config_fields import ConfigFields
from .recurrent_layers import Rwkv6, Rwkv7


def rwkv_heads(fields: ConfigFields) -> tuple[int, int]:
    """Return the number of heads and their size, of which a config may have only one.

    Raises:
        CheckpointError: They do not divide the hidden size.
    """
    hidden_size = fields.integer("hidden_size")
    count = fields.optional_integer("num_heads")
    size = fields.optional_integer("head_dim") or (hidden_size // count if count else 64)
    if hidden_size % size:
        raise fields.wrong("head_dim", f"a divisor of hidden_size {hidden_size}", size)
    return hidden_size // size, size


def read_rwkv7(fields: ConfigFields) -> Rwkv7:
    """Return the recurrent layer of an RWKV-7. Ranks have the defaults of flash-linear-attention.

    Raises:
        CheckpointError: A field is missing or invalid, or some layers have attention or wider values.
    """
    num_heads, head_dim = rwkv_heads(fields)
    if fields.get("attn") is not None:
        raise fields.wrong("attn", "null, because RWKV-7 has no attention", fields.get("attn"))
    widths = fields.get("value_dim")
    hidden_size = fields.integer("hidden_size")
    if widths is not None and any(
        each != hidden_size for each in (widths if isinstance(widths, list) else [widths])
    ):
        raise fields.wrong("value_dim", f"hidden_size {hidden_size} in every layer", widths)
    return Rwkv7(
        num_heads,
        head_dim,
        fields.integer("decay_low_rank_dim", 64),
        fields.integer("a_low_rank_dim", 64),
        fields.integer("v_low_rank_dim", 16),
        fields.integer("gate_low_rank_dim", 128, minimum=0),
        norm_eps=fields.number("output_norm_eps", head_dim * fields.number("norm_eps", 1e-5)),
        has_norm=fields.boolean("has_output_norm", True),
        shifts_mlp=fields.boolean("shifts_mlp", True),
    )


def read_rwkv6(fields: ConfigFields) -> Rwkv6:
    """Return the recurrent layer of an RWKV-6. Sizes have the defaults of flash-linear-attention.

    Raises:
        CheckpointError: A field is missing or invalid, or some layers have attention or wider values.
    """
    num_heads, head_dim = rwkv_heads(fields)
    fields.require("attn", None, ": RWKV-6 has no attention")
    fields.require("expand_v", 1.0)
    key_size = int(fields.integer("hidden_size") * fields.positive("expand_k", 0.5))
    if key_size % num_heads:
        raise fields.wrong("expand_k", f"such that {num_heads} heads divide the keys", key_size)
    return Rwkv6(
        num_heads,
        head_dim,
        key_size // num_heads,
        fields.integer("proj_low_rank_dim", 32),
        fields.integer("gate_low_rank_dim", 64),
        fields.number("output_norm_eps", fields.number("norm_eps", 1e-5)),
        fields.choice("mixtures", ("rwkvg", "wkvrg"), "rwkvg"),
        fields.integer("halving_period", 0, minimum=0),
        reads_own=not fields.boolean("shifts_mlp", True),
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        has_biases=fields.boolean("attention_bias", False),
    )


READERS: Final[dict[str, Callable[[ConfigFields], Rwkv6 | Rwkv7]]] = {
    "rwkv6": read_rwkv6,
    "rwkv7": read_rwkv7,
}
"""The functions that read a recurrent layer, by model type."""
