"""The model of a drafting head, as the head sees it."""

from __future__ import annotations

from typing import TypeAlias

from ....protocol.errors import ConfigError
from ...cpu.decoder import NativeDecoder
from ...models.decoder import Decoder
from ..model_loader import Model
from .layouts.read import NEEDS_ONE_STREAM

HeadTarget: TypeAlias = NativeDecoder | Decoder
"""A decoder that keeps the hidden states which a head reads."""


def head_target(model: Model, method: str) -> HeadTarget:
    """Return a model that can have a head.

    Args:
        model: The model.
        method: The method of the head.

    Raises:
        ConfigError: The model's layers are those of transformers.
    """
    if not isinstance(model, NativeDecoder | Decoder):
        raise ConfigError(NEEDS_ONE_STREAM.format(method))
    return model
