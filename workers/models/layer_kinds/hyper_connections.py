"""Layers with hyper-connections (arXiv 2409.19606): a token has several hidden states, which every block mixes.

Shapes: T tokens of a step, D hidden size, N streams (the hidden states of a token), E = N * D, F logits of factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ...attention import DeviceAttention
from ...layers.layer_spec import LayerSpec
from ...layers.layers import RMSNorm
from ...layers.specs.hyper import HyperConnectionsSpec
from ..decoder_layer import DecoderLayer
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..ngrams.block import ConvolvedNgramBlock, NgramBlock
from ..norms import read_stream_norm
from ..stage.passed_state import PassedState


class StreamSum:
    """A sum of a token's streams, each times a factor.

    Factors are computed from products of all streams, divided by their root mean square. The prefix of the source is
    the name of the product. It has several kinds of outputs, each with a scale; `sizes` are their numbers. The first N
    outputs are for the sum.
    """

    def __init__(
        self, hyper: HyperConnectionsSpec, source: LayerSource, sizes: Sequence[int] = ()
    ) -> None:
        spec, weights, name = source.spec, source.weights, source.prefix
        streams = hyper.num_streams
        sizes = sizes or (streams,)
        self._hyper = hyper
        self._norm_eps = spec.norm_eps
        weight = weights.read_float32(f"{name}.fn", sum(sizes), streams * spec.hidden_size)
        self._project = source.kernels.router_linear(weight)
        self._bias = weights.read_vector(f"{name}.base", sum(sizes))
        scales = weights.read_vector(f"{name}.scale", len(sizes))
        self._scale = torch.cat([scales[i].expand(size) for i, size in enumerate(sizes)])

    def reduce(self, x_TE: Tensor) -> Tensor:
        """Return the sum [T, D] in the dtype of the streams."""
        return self._sum(x_TE)[0]

    def _sum(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum [T, D], and the logits of the other factors, float32 [T, F]."""
        factors_TN, logits_TF = self._factors(x_TE)
        return _weighted_sum(x_TE, factors_TN), logits_TF

    def _factors(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of a sum, float32 [T, N], and the logits of the other factors, float32 [T, F]."""
        streams, x_float_TE = self._hyper.num_streams, x_TE.float()
        inverse_T1 = torch.rsqrt(x_float_TE.square().mean(-1, keepdim=True) + self._norm_eps)
        logits = self._project(x_float_TE) * inverse_T1 * self._scale + self._bias
        return torch.sigmoid(logits[:, :streams]) + self._hyper.eps, logits[:, streams:]


def _weighted_sum(x_TE: Tensor, factors_TN: Tensor) -> Tensor:
    streams_TND = x_TE.float().unflatten(-1, (factors_TN.shape[1], -1))
    return (streams_TND * factors_TN.unsqueeze(2)).sum(1).to(x_TE.dtype)


class StreamMean:
    """The mean of a token's streams."""

    def __init__(self, hyper: HyperConnectionsSpec) -> None:
        self._num_streams = hyper.num_streams

    def reduce(self, x_TE: Tensor) -> Tensor:
        """Return the mean [T, D] in the dtype of the streams."""
        return x_TE.unflatten(-1, (self._num_streams, -1)).mean(1)


class HyperConnection(StreamSum):
    """The connection of one block to the streams: it reads a sum of them, and its output is added to each."""

    def __init__(self, hyper: HyperConnectionsSpec, source: LayerSource) -> None:
        streams = hyper.num_streams
        sizes = [streams, streams, *[streams**2] * bool(hyper.num_iterations)]
        super().__init__(hyper, source, sizes)

    def update(self, x_TE: Tensor, block: Callable[[Tensor], Tensor]) -> None:
        """Add the output of the block, a function of the sum, to the streams in place."""
        hyper, streams = self._hyper, self._hyper.num_streams
        x_TD, logits_TF = self._sum(x_TE)
        factors_TN = torch.sigmoid(logits_TF[:, :streams]) * hyper.output_scale
        if not hyper.num_iterations:
            factors_TN = factors_TN + hyper.eps
        added_TND = block(x_TD).float().unsqueeze(1) * factors_TN.unsqueeze(2)
        kept_TE = x_TE.float()
        if hyper.num_iterations:
            mixing_TNN = self._mixing(logits_TF[:, streams:].unflatten(-1, (streams, streams)))
            kept_TND = kept_TE.unflatten(-1, (streams, -1))
            # Add stream by stream, so that the order of a sum does not depend on the number of tokens.
            mixed = [mixing_TNN[:, i, :, None] * kept_TND[:, i, None] for i in range(streams)]
            kept_TE = sum(mixed[1:], mixed[0]).flatten(1)
        x_TE.copy_(kept_TE + added_TND.flatten(1))

    def _mixing(self, logits_TNN: Tensor) -> Tensor:
        """Return the factors of each stream (row) in each new stream (column), whose sums are close to 1."""
        eps = self._hyper.eps
        factors_TNN = logits_TNN.softmax(-1) + eps
        factors_TNN = factors_TNN / (factors_TNN.sum(-2, keepdim=True) + eps)
        for _ in range(self._hyper.num_iterations - 1):
            factors_TNN = factors_TNN / (factors_TNN.sum(-1, keepdim=True) + eps)
            factors_TNN = factors_TNN / (factors_TNN.sum(-2, keepdim=True) + eps)
        return factors_TNN


class DelayedFactors(PassedState):
    """The factors with which the next block of a stage reads the streams, float32 [T, N]; None for the first stream.

    Stages send each other their bytes, which every dtype of hidden states has exactly.
    """

    def __init__(self, hyper: HyperConnectionsSpec) -> None:
        self._num_streams = hyper.num_streams
        self.factors_TN: Tensor | None = None

    def receive(self, received_TE: Tensor | None) -> None:
        """See `PassedState.receive`."""
        self.factors_TN = None
        if received_TE is not None:
            # A single row of a larger tensor is contiguous, but cannot be viewed as another dtype.
            bytes_TE = received_TE.to(torch.uint8).clone(memory_format=torch.contiguous_format)
            self.factors_TN = bytes_TE.view(torch.float32)

    def sent(self) -> Tensor | None:
        """See `PassedState.sent`."""
        return None if self.factors_TN is None else self.factors_TN.contiguous().view(torch.uint8)

    def reduce(self, x_TE: Tensor) -> Tensor:
        """Return the sum [T, D] in the dtype of the streams."""
        if self.factors_TN is None:
            return x_TE.unflatten(-1, (self._num_streams, -1))[:, 0].clone()
        return _weighted_sum(x_TE, self.factors_TN)


class DelayedConnection(HyperConnection):
    """The connection of a block that reads the sum with the factors of the block before it."""

    def __init__(self, hyper: HyperConnectionsSpec, source: LayerSource) -> None:
        super().__init__(hyper, source)
        self.state = DelayedFactors(hyper)
        """The factors that the blocks of a stage share, which `share_factors` sets."""

    def _sum(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        factors_TN, logits_TF = self._factors(x_TE)
        x_TD = self.state.reduce(x_TE)
        self.state.factors_TN = factors_TN
        return x_TD, logits_TF


def share_factors(hyper: HyperConnectionsSpec, layers: Iterable[object]) -> DelayedFactors:
    """Return what the blocks of these layers pass on to each other, after setting it for each of them."""
    state = DelayedFactors(hyper)
    for layer in layers:
        assert isinstance(layer, HyperLayer)
        for each in layer.connections:
            assert isinstance(each, DelayedConnection)
            each.state = state
    return state


class LowRankSum:
    """A mean of a token's normed streams, each element times a factor, which a product of low rank computes."""

    def __init__(self, hyper: HyperConnectionsSpec, source: LayerSource) -> None:
        spec = source.spec
        self._num_streams = hyper.num_streams
        size = hyper.num_streams * spec.hidden_size
        self._norm = read_stream_norm(spec, source.weights, f"{source.prefix}.hc_norm")
        self._down, self._up = (
            source.read_linear(f".input_mix_weight_{part}", *shape)
            for part, shape in (("down", (hyper.rank, size)), ("up", (size, hyper.rank)))
        )

    def reduce(self, x_TE: Tensor) -> Tensor:
        """Return the mean [T, D]."""
        return self._mean(x_TE)[0]

    def _mean(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean [T, D], and the normed streams [T, E]."""
        normed_TND = self._norm(x_TE.unflatten(-1, (self._num_streams, -1)))
        normed_TE = normed_TND.flatten(1)
        reduced = F.silu(self._down(normed_TE) / self._num_streams)
        factors_TND = torch.sigmoid(self._up(reduced)).view_as(normed_TND)
        return (factors_TND * normed_TND).mean(1), normed_TE


class LowRankConnection(LowRankSum):
    """The connection of one block to the streams: it reads a mean of them, and its output is added to each."""

    def __init__(self, hyper: HyperConnectionsSpec, source: LayerSource) -> None:
        super().__init__(hyper, source)
        self._output_scale = hyper.output_scale
        shape = hyper.num_streams, hyper.num_streams * source.spec.hidden_size
        name = f"{source.prefix}.block_inject_weight.weight"
        self._inject = source.kernels.router_linear(source.weights.read_float32(name, *shape))

    def update(self, x_TE: Tensor, block: Callable[[Tensor], Tensor]) -> None:
        """Add the output of the block, a function of the mean, to the streams in place."""
        x_TD, normed_TE = self._mean(x_TE)
        logits_TN = self._inject(normed_TE) / self._num_streams
        factors_TN1 = (torch.sigmoid(logits_TN) * self._output_scale).unsqueeze(2).to(x_TE.dtype)
        x_TE += (block(x_TD).unsqueeze(1) * factors_TN1).flatten(1)


Reducer: TypeAlias = DelayedFactors | LowRankSum | StreamMean | StreamSum
"""The reduction of a token's streams to one hidden state, which the final norm or the head reads."""


def read_reducer(hyper: HyperConnectionsSpec, source: LayerSource) -> Reducer:
    """Return the sum or the mean of the streams after the last layer. The prefix of `source` is its name."""
    if hyper.averages_last:
        return StreamMean(hyper)
    kind = LowRankSum if hyper.rank else StreamSum
    return kind(hyper, source)


class HyperLayer(DecoderLayer):
    """A decoder layer whose attention and MLP have hyper-connections instead of a residual stream."""

    def __init__(
        self,
        hyper: HyperConnectionsSpec,
        layer: LayerSpec,
        source: LayerSource,
        attention: DeviceAttention,
    ) -> None:
        super().__init__(layer, source, attention)
        kind: type[HyperConnection | LowRankConnection] = HyperConnection
        if hyper.rank:
            kind = LowRankConnection
        elif hyper.delayed:
            kind = DelayedConnection
        self.connections = [kind(hyper, source.at(name)) for name in ("attn_hc", "mlp_hc")]
        """The connections around the attention and the MLP."""
        self._ngrams: NgramBlock | None = None
        if (ngrams := source.spec.ngrams) is not None and layer.ngram_table is not None:
            block = ConvolvedNgramBlock if ngrams.taps else NgramBlock
            self._ngrams = block(ngrams, layer, source.at("ple."))

    def forward(self, x_TE: Tensor, block_TD: Tensor | None, step: LayerStep) -> None:
        """Update the streams `x_TE` in place.

        Nothing is left to be added, so the result is None.
        """
        if self._ngrams is not None:
            self._ngrams.add_to(x_TE, step)
        around_attention, around_mlp = self.connections
        around_attention.update(
            x_TE,
            lambda x_TD: self._mixed(normed(x_TD, self._attention_input_norm), step),
        )
        around_mlp.update(
            x_TE, lambda x_TD: self._feed(normed(x_TD, self._mlp_input_norm), step.own_TP)
        )


def normed(x_TD: Tensor, norm: RMSNorm | None) -> Any:
    """Return the input of a block, after its norm if it has one."""
    return x_TD if norm is None else norm(x_TD)
