"""Layers with hyper-connections (arXiv 2409.19606): a token has several hidden states, which every block mixes.

Shapes: T tokens of a step, D hidden size, N streams (the hidden states of a token), E = N * D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class StreamSum:
    """A sum of a token's streams, each times a factor.

    Factors are sigmoids of products of all streams, divided by their root mean square. The product called `name` has N
    outputs for each of `count` factors of a stream, of which the first is for the sum.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hyper: HyperConnectionsSpec,
        weights: WeightReader,
        name: str,
        kernels: LayerKernels,
        count: int = 1,
    ) -> None:
        streams = hyper.num_streams
        self._hyper = hyper
        self._norm_eps = spec.norm_eps
        weight = weights.read_float32(f"{name}.fn", count * streams, streams * spec.hidden_size)
        self._project = kernels.router_linear(weight)
        self._bias = weights.read_vector(f"{name}.base", count * streams)
        self._scale = weights.read_vector(f"{name}.scale", count).repeat_interleave(streams)

    def reduce(self, x_TE: Tensor) -> Tensor:
        """Return the sum [T, D] in the dtype of the streams."""
        return self._sum(x_TE)[0]

    def _sum(self, x_TE: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the sum [T, D], and the sigmoids of the other factors, each float32 [T, N]."""
        streams = self._hyper.num_streams
        x_float_TE = x_TE.float()
        inverse_T1 = torch.rsqrt(x_float_TE.square().mean(-1, keepdim=True) + self._norm_eps)
        logits = self._project(x_float_TE) * inverse_T1 * self._scale + self._bias
        first_TN, *others = torch.sigmoid(logits).split(streams, -1)
        factors_TN1 = (first_TN + self._hyper.eps).unsqueeze(2)
        x_TD = (x_float_TE.unflatten(-1, (streams, -1)) * factors_TN1).sum(1)
        return x_TD.to(x_TE.dtype), tuple(others)


class HyperConnection(StreamSum):
    """The connection of one block to the streams: it reads a sum of them, and its output is added to each."""

    def __init__(
        self,
        spec: ModelSpec,
        hyper: HyperConnectionsSpec,
        weights: WeightReader,
        name: str,
        kernels: LayerKernels,
    ) -> None:
        super().__init__(spec, hyper, weights, name, kernels, count=2)

    def update(self, x_TE: Tensor, block: Callable[[Tensor], Tensor]) -> None:
        """Add the output of the block, a function of the sum, to the streams in place."""
        x_TD, (outputs_TN,) = self._sum(x_TE)
        factors_TN1 = (outputs_TN * self._hyper.output_scale + self._hyper.eps).unsqueeze(2)
        added_TND = block(x_TD).float().unsqueeze(1) * factors_TN1
        x_TE.copy_(x_TE.float() + added_TND.flatten(1))


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
        attention_norm, mlp, mlp_norm = self._attention_input_norm, self._mlp, self._mlp_input_norm
        assert attention_norm is not None and mlp is not None and mlp_norm is not None
        self._around_attention.update(
            x_TE, lambda x_TD: self._mixed(attention_norm(x_TD), positions_T, tables, caches)
        )
        self._around_mlp.update(x_TE, lambda x_TD: mlp.forward(mlp_norm(x_TD)))
