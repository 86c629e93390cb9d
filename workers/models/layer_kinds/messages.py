"""Messages that layers pass on when they are computed several times; see `PassesSpec`.

Shapes: T tokens of a step, D hidden size, N streams (the hidden states of a token), E = N * D.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layers.layers import RMSNorm
from ...layers.spec import ModelSpec
from ...layers.specs.attention_residuals import AttentionResidualsSpec
from ..layer_source import LayerSource
from ..weights import WeightReader
from .stream_attention import stream_means

MESSAGES = ("attn", "k", "v", "mlp")
"""The names of a layer's messages: to queries, keys, values and the MLP."""
_QUERIES = ("message_queries", "message_kv_queries")


def read_message_queries(
    spec: ModelSpec, residuals: AttentionResidualsSpec, weights: WeightReader, index: int
) -> dict[str, Tensor]:
    """Return the queries [D] of the messages of one of the looped layers, float32, by their names."""
    assert residuals.passes is not None
    shape = residuals.passes.num_layers, 2, spec.hidden_size
    of_blocks_2D, of_inputs_2D = (
        weights.read_elements(name, 2 * shape[0] * shape[2]).view(shape)[index]
        * spec.hidden_size**-0.5
        for name in _QUERIES
    )
    return dict(zip(MESSAGES, (of_blocks_2D[0], *of_inputs_2D, of_blocks_2D[1]), strict=True))


def skip_message_queries(weights: WeightReader) -> None:
    """Mark the queries as read. Stages without layers that read messages need none."""
    weights.skip(_QUERIES)


class Messages:
    """The messages to one layer, and the gates with which its inputs are combined with them."""

    def __init__(self, residuals: AttentionResidualsSpec, source: LayerSource, index: int) -> None:
        spec, looped = source.spec, residuals.looped_index(index)
        assert residuals.passes is not None and looped is not None
        size, rank = spec.hidden_size, residuals.passes.rank
        self._residuals, self._shape = residuals, (residuals.num_streams, size)
        self._queries = read_message_queries(spec, residuals, source.weights, looped)
        self._down = {
            name: source.read_linear(f"{name}_message.down", rank, 2 * size) for name in MESSAGES
        }
        self._gates = {
            name: [
                source.read_linear(f"{name}_message.{gate}", size, rank)
                for gate in ("forget", "gain")
            ]
            for name in MESSAGES
        }
        self._norm = RMSNorm(torch.ones(size, device=source.weights.device), spec.norm_eps)

    def combine(self, x_TE: Tensor, inputs: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
        """Return inputs [T, D] combined with the messages called `names`."""
        count = len(self._residuals.repeated_sums)
        sums_TRD = x_TE.unflatten(-1, self._shape)[:, -count:]
        messages = stream_means(self._residuals, sums_TRD, [self._queries[name] for name in names])
        return [
            self._combine(x_TD, message_TD, name)
            for x_TD, message_TD, name in zip(inputs, messages, names, strict=True)
        ]

    def _combine(self, x_TD: Tensor, message_TD: Tensor, name: str) -> Tensor:
        both_TX = torch.cat((self._norm(x_TD), self._norm(message_TD)), -1)
        low_rank = self._down[name](both_TX)
        forget_TD, gain_TD = (gate(low_rank).float().tanh() for gate in self._gates[name])
        combined_TD = (1 - forget_TD) * x_TD.float() + gain_TD * message_TD.float()
        return combined_TD.to(x_TD.dtype)
