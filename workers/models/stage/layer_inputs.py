"""The inputs of layers beside the hidden states, which the first pipeline stage computes from the tokens.

Every stage sends the next one the inputs of its layers, beside the hidden states.

Shapes: T tokens of a step, D hidden size, E elements of a token that a stage sends, P of a layer's input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ....protocol.checkpoint.recurrent_layers import NUM_TOKEN_DIGITS
from ...towers.placed import Placed
from ..layer_source import LayerSource
from ..ngrams.digits import from_digits, to_digits
from ..per_layer_inputs import PerLayerInputs


class LayerInputs(ABC):
    """Computes and passes on the inputs of the layers of a model.

    Inputs are sequences with one tensor a layer, from the first layer of this stage to the last of the model that has
    an input.
    """

    @abstractmethod
    def of_tokens(
        self, ids_T: Tensor, x_TD: Tensor, placed: Placed | None, earlier_TW: Tensor | None
    ) -> Sequence[Tensor]:
        """Return the inputs for tokens with the embeddings `x_TD`, in the first stage.

        `earlier_TW` are the `ModelSpec.num_earlier_tokens` before each, the last one first; negative for none.
        """

    @abstractmethod
    def received(self, inputs_TE: Tensor) -> Sequence[Tensor]:
        """Return the inputs that the previous stage sent."""

    @abstractmethod
    def sent(self, inputs: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        """Return the tensors [T, …] to send for the inputs of the next stages, with the dtype of hidden states."""


def read_layer_inputs(source: LayerSource) -> LayerInputs | None:
    """Return the inputs of a model's layers, or None if none has any."""
    spec, first_layer = source.spec, source.shard.layers.start
    if spec.per_layer_inputs is not None or any(layer.input_size for layer in spec.layers):
        return _OwnInputs(source)
    if spec.last_embedding_layer >= 0:
        return _Embeddings(spec.last_embedding_layer + 1 - first_layer)
    if spec.last_token_layer >= 0:
        kind = _TokenIds if spec.num_layer_tokens == 1 else _LastTokens
        return kind(spec.last_token_layer + 1 - first_layer)
    return None


class _OwnInputs(LayerInputs):
    """Each layer has an input of its own [T, P]."""

    def __init__(self, source: LayerSource) -> None:
        spec = source.spec
        self._placed_id: int | None = None
        self._compute: PerLayerInputs | None = None
        if (inputs := spec.per_layer_inputs) is None:
            self._sizes = [layer.input_size for layer in spec.layers]
            return
        self._placed_id = inputs.placed_token_id
        self._sizes = [inputs.size] * (len(spec.layers) - source.shard.layers.start)
        if source.shard.is_first and spec.has_embedding:
            self._compute = PerLayerInputs(
                spec, inputs, source.weights, source.shard, source.kernels
            )

    def of_tokens(
        self, ids_T: Tensor, x_TD: Tensor, placed: Placed | None, earlier_TW: Tensor | None
    ) -> Sequence[Tensor]:
        assert self._compute is not None
        if placed is not None and self._placed_id is not None:
            ids_T = placed.replace_ids(ids_T, self._placed_id)
        return self._compute(ids_T, x_TD).split(self._sizes, -1)

    def received(self, inputs_TE: Tensor) -> Sequence[Tensor]:
        return [part.contiguous() for part in inputs_TE.split(self._sizes, -1)]

    def sent(self, inputs: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        return inputs


class _Embeddings(LayerInputs):
    """The next `num_layers` layers get the embeddings of the tokens."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers

    def of_tokens(
        self, ids_T: Tensor, x_TD: Tensor, placed: Placed | None, earlier_TW: Tensor | None
    ) -> Sequence[Tensor]:
        return self.received(x_TD.clone())

    def received(self, inputs_TE: Tensor) -> Sequence[Tensor]:
        return (inputs_TE,) * self._num_layers

    def sent(self, inputs: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        return inputs[:1]


class _TokenIds(LayerInputs):
    """The inputs are the token ids, for the next `num_layers` layers. Stages send them as digits; see `to_digits`."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers

    def of_tokens(
        self, ids_T: Tensor, x_TD: Tensor, placed: Placed | None, earlier_TW: Tensor | None
    ) -> Sequence[Tensor]:
        return (ids_T,) * self._num_layers

    def received(self, inputs_TE: Tensor) -> Sequence[Tensor]:
        return (from_digits(inputs_TE),) * self._num_layers

    def sent(self, inputs: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        return [to_digits(ids_T, dtype) for ids_T in inputs[:1]]


class _LastTokens(_TokenIds):
    """The inputs are the token ids, each with those before it [T, L], the last one first; negative for none."""

    def of_tokens(
        self, ids_T: Tensor, x_TD: Tensor, placed: Placed | None, earlier_TW: Tensor | None
    ) -> Sequence[Tensor]:
        assert earlier_TW is not None
        ids_TL = torch.cat((ids_T.long().unsqueeze(1), earlier_TW.long()), 1)
        return (ids_TL,) * self._num_layers

    def received(self, inputs_TE: Tensor) -> Sequence[Tensor]:
        ids_TL = from_digits(inputs_TE.unflatten(-1, (-1, NUM_TOKEN_DIGITS))) - 1
        return (ids_TL,) * self._num_layers

    def sent(self, inputs: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
        return [
            to_digits(ids_TL.flatten() + 1, dtype).view(len(ids_TL), -1) for ids_TL in inputs[:1]
        ]
