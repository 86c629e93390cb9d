"""Readers of config fields that several audio encoders share."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ..config_fields import ConfigFields

MAX_POSITIONS: Final = 1 << 16

Channels = Annotated[int, msgspec.Meta(ge=1, le=MAX_POSITIONS)]


def read_size(
    audio: ConfigFields, name: str, other: str, default: int, maximum: int = MAX_POSITIONS
) -> int:
    """Return a size, which configs have under one of two names."""
    return audio.integer(name if audio.get(name) is not None else other, default, maximum=maximum)


def read_num_heads(audio: ConfigFields, hidden_size: int, default: int) -> int:
    """Return the number of attention heads. Raise CheckpointError if they do not divide the hidden size."""
    num_heads = read_size(audio, "encoder_attention_heads", "num_attention_heads", default)
    if hidden_size % num_heads:
        raise audio.error(
            f"{audio.prefix}d_model {hidden_size} must be a multiple of the {num_heads} attention heads"
        )
    return num_heads


def read_token(
    fields: ConfigFields, name: str, default: int, other: ConfigFields | None = None
) -> int:
    """Return a token id from the first of two files that contains it."""
    if fields.get(name) is None and other is not None:
        fields = other
    value = fields.get(name, default)
    return default if value == default else fields.integer(name, minimum=0)
