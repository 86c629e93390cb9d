"""The model of a drafting head, as the head sees it."""

from __future__ import annotations

from typing import TypeAlias

from ....protocol.errors import ConfigError
from ...cpu.decoder import NativeDecoder
from ...models.decoder import Decoder
from ..model_loader import Model

HeadTarget: TypeAlias = NativeDecoder | Decoder
"""A decoder that keeps the hidden states which a head reads."""


def head_target(model: Model, method: str) -> HeadTarget:
    """Return a model that can have a head.

    Args:
        model: The model.
        method: The name of the head in error messages.

    Raises:
        ConfigError: The model's layers are those of transformers, or the head reads inputs of layers that have several
            hidden states for a token.
    """
    if not isinstance(model, NativeDecoder | Decoder) or (
        model.spec.num_streams and model.kept_width > model.spec.hidden_size
    ):
        raise ConfigError(
            f"{method} needs a model with Engine's own layers and one hidden state per token; use another method"
        )
    return model
