"""Layers with hyper-connections (arXiv 2409.19606): a token has several hidden states, which every block mixes.

Shapes: T tokens of a step, D hidden size, N streams (the hidden states of a token), E = N * D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..attention import AttentionBackend
from ..layers.hyper_spec import HyperConnectionsSpec
from ..layers.layers import LayerKernels
from ..layers.parallel.shard import ModelShard
from ..layers.rope import RotaryTables
from ..layers.spec import LayerSpec, ModelSpec
from .decoder_layer import DecoderLayer
from .weights import WeightReader


class StreamFactors:
    """Computes factors of a token's streams: sigmoids of products of all streams, divided by their root mean square.

    The product called `name` has N outputs for each of `count` factors.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hyper: HyperConnectionsSpec,
        count: int,
        weights: WeightReader,
        name: str,
        kernels: LayerKernels,
    ) -> None:
        streams = hyper.num_streams
        self._streams = streams
        self._norm_eps = spec.norm_eps
        weight = weights.read_float32(f"{name}.fn", count * streams, streams * spec.hidden_size)
        self._project = kernels.router_linear(weight)
        self._bias = weights.read_vector(f"{name}.base", count * streams)
        self._scale = weights.read_vector(f"{name}.scale", count).repeat_interleave(streams)

    def __call__(self, x_TE: Tensor) -> tuple[Tensor, ...]:
        """Return the factors, each float32 [T, N]."""
        x_TE = x_TE.float()
        inverse_T1 = torch.rsqrt(x_TE.square().mean(-1, keepdim=True) + self._norm_eps)
        logits = self._project(x_TE) * inverse_T1 * self._scale + self._bias
        return torch.sigmoid(logits).split(self._streams, -1)


class HyperConnection:
    """The connection of one block to the streams: it reads a sum of them, and its output is added to each."""

    def __init__(
        self,
        spec: ModelSpec,
        hyper: HyperConnectionsSpec,
        weights: WeightReader,
        name: str,
        kernels: LayerKernels,
    ) -> None:
        self._hyper = hyper
        self._factors = StreamFactors(spec, hyper, 2, weights, name, kernels)

    def read(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block's input [T, D], and the factors of its output for each stream, float32 [T, N]."""
        inputs_TN, outputs_TN = self._factors(x_TE)
        x_TD = sum_streams(x_TE, inputs_TN + self._hyper.eps)
        return x_TD, outputs_TN * self._hyper.output_scale + self._hyper.eps

    @staticmethod
    def add(x_TE: Tensor, block_TD: Tensor, factors_TN: Tensor) -> None:
        """Add the block's output to the streams in place."""
        added_TND = block_TD.float().unsqueeze(1) * factors_TN.unsqueeze(2)
        x_TE.copy_(x_TE.float() + added_TND.flatten(1))


class StreamReducer:
    """Reduces the streams to the hidden state [T, D] that the final norm reads."""

    def __init__(
        self,
        spec: ModelSpec,
        hyper: HyperConnectionsSpec,
        weights: WeightReader,
        kernels: LayerKernels,
    ) -> None:
        self._eps = hyper.eps
        self._factors = StreamFactors(spec, hyper, 1, weights, "head_hc", kernels)

    def reduce(self, x_TE: Tensor) -> Tensor:
        """Return a sum of the streams."""
        (factors_TN,) = self._factors(x_TE)
        return sum_streams(x_TE, factors_TN + self._eps)


def sum_streams(x_TE: Tensor, factors_TN: Tensor) -> Tensor:
    """Return the sum [T, D] of the streams, multiplied by their factors, in the dtype of the streams."""
    x_TND = x_TE.unflatten(-1, (factors_TN.shape[1], -1))
    return (x_TND.float() * factors_TN.unsqueeze(2)).sum(1).to(x_TE.dtype)


class HyperLayer(DecoderLayer):
    """A decoder layer whose attention and MLP have hyper-connections instead of a residual stream."""

    def __init__(
        self,
        spec: ModelSpec,
        hyper: HyperConnectionsSpec,
        layer: LayerSpec,
        weights: WeightReader,
        prefix: str,
        attention: AttentionBackend,
        shard: ModelShard,
        kernels: LayerKernels,
    ) -> None:
        super().__init__(spec, layer, weights, prefix, attention, shard, kernels)
        self._around_attention, self._around_mlp = (
            HyperConnection(spec, hyper, weights, f"{prefix}{name}", kernels)
            for name in ("attn_hc", "mlp_hc")
        )

    def forward(
        self,
        x_TE: Tensor,
        block_TD: Tensor | None,
        positions_T: Tensor,
        tables: RotaryTables | None,
        caches: Sequence[tuple[Tensor, Any]],
        inputs_TP: Tensor | None,
    ) -> None:
        """Update the streams `x_TE` in place.

        Nothing is left to be added, so the result is None.
        """
        assert self._attention_input_norm is not None
        assert self._mlp is not None and self._mlp_input_norm is not None
        x_TD, factors_TN = self._around_attention.read(x_TE)
        attended_TD = self._mixed(self._attention_input_norm(x_TD), positions_T, tables, caches)
        HyperConnection.add(x_TE, attended_TD, factors_TN)
        x_TD, factors_TN = self._around_mlp.read(x_TE)
        HyperConnection.add(x_TE, self._mlp.forward(self._mlp_input_norm(x_TD)), factors_TN)
