"""The model of a drafting head, as the head sees it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ....protocol.arrays import Int32Array
from ....protocol.errors import ConfigError
from ...cpu.decoder import NativeDecoder
from ...layers.spec import ModelSpec
from ...models.decoder import Decoder
from ..model_loader import Model


class HeadTarget(Protocol):
    """A decoder that keeps the hidden states which a head reads. The native one and that in torch implement this.

    Shapes: T tokens, S rows to sample, C candidate tokens, D hidden size, E elements of a token's kept hidden states.
    """

    kept_width: int
    """The number E."""

    @property
    def spec(self) -> ModelSpec:
        """The description of the model."""

    @property
    def attention(self) -> Any:
        """The attention backend, or the KV cache of a native program."""

    def embed(self, ids_T: Tensor) -> Tensor:
        """Return the embeddings of tokens, float32 [T, D]."""

    def choose_tokens(
        self, hidden_SD: Tensor, slots_S: Int32Array, positions_S: Int32Array
    ) -> Tensor:
        """Return the tokens [S] that the requests in these slots would sample from normed hidden states."""

    def choose_among(
        self, ids_C: Tensor, logits_SC: Tensor, slots_S: Int32Array, positions_S: Int32Array
    ) -> Tensor:
        """Return the tokens [S] that the requests would sample if only the tokens `ids_C` had logits."""


def head_target(model: Model, method: str) -> HeadTarget:
    """Return a model that can have a head.

    Args:
        model: The model.
        method: The name of the head in error messages.

    Raises:
        ConfigError: The model's layers are those of transformers, or have several hidden states for a token.
    """
    if not isinstance(model, NativeDecoder | Decoder) or model.spec.num_streams:
        raise ConfigError(
            f"{method} needs a model with Engine's own layers and one hidden state per token; use another method"
        )
    return model
