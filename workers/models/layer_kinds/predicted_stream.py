"""Layers with two hidden states of each token, of which the second one predicts the next token (ProphetNet).

Shapes: T tokens of a step, D hidden size, E = 2 * D, S = 2 T states.
"""

from __future__ import annotations

from torch import Tensor

from ...attention import AttentionBackend
from ...layers.layer_spec import LayerSpec
from ...layers.layers import RMSNorm
from ...layers.specs.relative_biases import PredictedStreamSpec
from ..attention_kinds.predicted_stream import PredictedStreamAttention, PredictedStreamReader
from ..cross_attention import CrossAttention
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..mlp import MLP
from ..norms import read_norm


class PredictedStreamLayer:
    """Attention, cross attention and an MLP of both states, with a norm after each. Both have the same weights."""

    def __init__(
        self,
        stream: PredictedStreamSpec,
        layer: LayerSpec,
        source: LayerSource,
        attention: AttentionBackend,
    ) -> None:
        spec, weights, prefix, _, kernels = source
        self.rope = layer.rope
        self.cache_groups = layer.cache_groups
        self._attention = PredictedStreamAttention(stream, source.at("self_attn."), attention)
        self._reader = PredictedStreamReader(stream, source.at("cross_attn."), attention)
        self.cross: CrossAttention | None = self._reader
        self._mlp = MLP(source.at("mlp."), spec.intermediate_size)
        self._attention_norm, self._cross_norm, self._mlp_norm = (
            read_norm(spec, weights, f"{prefix}{name}_norm", kernels)
            for name in ("attention", "cross", "mlp")
        )

    def forward(self, x_TE: Tensor, block_TD: Tensor | None, step: LayerStep) -> None:
        """Update the states `x_TE` in place. Nothing is left to be added, so the result is None."""
        x_SD = x_TE.unflatten(-1, (2, -1)).flatten(0, 1)
        x_SD = _added(x_SD, self._attention.forward(x_SD, *step.caches[0]), self._attention_norm)
        x_SD = _added(x_SD, self._reader.forward(x_SD, *step.caches[-1]), self._cross_norm)
        x_SD = _added(x_SD, self._mlp.forward(x_SD), self._mlp_norm)
        x_TE.copy_(x_SD.view_as(x_TE))


def _added(x_SD: Tensor, block_SD: Tensor, norm: RMSNorm) -> Tensor:
    return norm(x_SD + block_SD)


class PredictedStream:
    """The end of the layers, where only the second state of a token is left."""

    def reduce(self, x_TE: Tensor) -> Tensor:
        """Return the second states [T, D]."""
        return x_TE[:, x_TE.shape[1] // 2 :]
