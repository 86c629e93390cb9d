"""Read the recurrent layers of RWKV models from a config of flash-linear-attention."""

from __future__ import annotations

from .config_fields import ConfigFields
from .recurrent_layers import Rwkv7


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


READERS = {"rwkv7": read_rwkv7}
"""The functions that read a recurrent layer, by model type."""
