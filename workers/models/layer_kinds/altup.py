"""Layers with alternating updates (AltUp, Gemma 3n): a token has several hidden states, and each layer computes one.

Shapes: T tokens of a step, D hidden size, N streams (the hidden states of a token), P elements of a token's input for
one layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention import AttentionBackend
from ...layers.layer_spec import LayerSpec
from ...layers.layers import LayerKernels, RMSNorm
from ...layers.spec import ModelSpec
from ...layers.specs.altup import AltUpSpec
from ..attention import Attention
from ..cross_attention import CrossAttention
from ..layer_source import LayerSource
from ..layer_step import LayerStep
from ..mlp import MLP
from ..per_layer_inputs import PerLayerBlock
from ..weights import Rows, WeightReader

_SMALLEST_SQUARE = 1e-5


class Streams:
    """Expands embeddings to the streams, or reduces the streams to one hidden state.

    There is one matrix per additional stream. The products are scaled to the root mean square of the first stream.
    """

    def __init__(
        self,
        spec: ModelSpec,
        altup: AltUpSpec,
        weights: WeightReader,
        name: str,
        kernels: LayerKernels,
    ) -> None:
        size = spec.hidden_size
        self._size = size
        self._products = [
            kernels.linear(weights.read_matrix(f"{name}.{i}.weight", size, size))
            for i in range(altup.num_streams - 1)
        ]

    def expand(self, x_TD: Tensor) -> Tensor:
        """Return the streams [T, N * D] of embeddings."""
        target_T1 = _square_mean(x_TD).sqrt()
        others = [_with_magnitude(multiply(x_TD), target_T1) for multiply in self._products]
        return torch.cat((x_TD, *others), -1)

    def reduce(self, x_TE: Tensor) -> Tensor:
        """Return the mean [T, D] of the streams [T, N * D], after multiplying all but the first by their matrices."""
        first_TD, *others = x_TE.unflatten(-1, (-1, self._size)).unbind(1)
        target_T1 = _square_mean(first_TD).sqrt()
        products = [
            _with_magnitude(multiply(x_TD.contiguous()), target_T1)
            for multiply, x_TD in zip(self._products, others, strict=True)
        ]
        return torch.stack((first_TD, *products)).mean(0)


def _square_mean(x_TD: Tensor) -> Tensor:
    return x_TD.float().square().mean(-1, keepdim=True)


def _with_magnitude(x_TD: Tensor, target_T1: Tensor) -> Tensor:
    own_T1 = _square_mean(x_TD).clamp(min=_SMALLEST_SQUARE).sqrt()
    return (x_TD.float() * (target_T1 / own_T1)).to(x_TD.dtype)


class AltUpLayer:
    """Predicts all streams, computes attention and MLP of one, and corrects all streams by the prediction error."""

    def __init__(
        self, altup: AltUpSpec, layer: LayerSpec, source: LayerSource, attention: AttentionBackend
    ) -> None:
        spec, weights, prefix, kernels = source.spec, source.weights, source.prefix, source.kernels

        def norm(name: str) -> RMSNorm:
            weight_D = weights.read_vector(f"{prefix}{name}.weight", hidden)
            return kernels.norm(weight_D, spec.norm_eps)

        hidden, count, rank = spec.hidden_size, altup.num_streams, altup.laurel_rank
        self.rope = layer.rope
        self.cache_groups = layer.cache_groups
        self.cross: CrossAttention | None = None
        self._altup = altup
        self._attention = Attention(layer, source.at("self_attn."), attention)
        self._mlp = MLP(source.at("mlp."), spec.intermediate_size, layer.activation_sparsity)
        self._attention_input_norm = norm("input_layernorm")
        self._attention_output_norm = norm("post_attention_layernorm")
        self._mlp_input_norm = norm("pre_feedforward_layernorm")
        self._mlp_output_norm = norm("post_feedforward_layernorm")
        self._laurel_norm = norm("laurel.post_laurel_norm")
        self._router_norm = norm("altup.router_norm")
        self._router_scale = 1 / hidden
        self._router, self._predict, self._correct = (
            kernels.linear(weights.read(f"{prefix}altup.{name}.weight", rows, columns))
            for name, rows, columns in (
                ("modality_router", count, hidden),
                ("prediction_coefs", count * count, count),
                ("correction_coefs", count, count),
            )
        )
        self._left, self._right = (
            source.read_rows(
                [Rows(f"{prefix}laurel.{name}", rows, range(rows))], columns, is_adapted=True
            )
            for name, rows, columns in (
                ("linear_left", rank, hidden),
                ("linear_right", hidden, rank),
            )
        )
        self._output_scale_D = weights.read(f"{prefix}altup.correct_output_scale", hidden)
        self._per_layer: PerLayerBlock | None = None
        if spec.per_layer_inputs is not None:
            self._per_layer = PerLayerBlock(spec.per_layer_inputs, source)

    def forward(self, x_TE: Tensor, block_TD: Tensor | None, step: LayerStep) -> None:
        """Update the streams `x_TE`, [T, N * D], in place.

        Nothing is left to be added, so the second result is None.
        """
        active, count = self._altup.active, self._altup.num_streams
        x_TND = x_TE.unflatten(-1, (count, -1))
        factors_TNN = self._predict(self._modalities(x_TND[:, active])).unflatten(-1, (count, -1))
        predicted_TND = torch.bmm(factors_TNN, x_TND) + x_TND
        predicted_TD = predicted_TND[:, active].contiguous()
        computed_TD = self._computed(predicted_TD, step)
        factors_TN = self._correct(self._modalities(computed_TD)) + 1
        error_TD = computed_TD - predicted_TD
        corrected_TND = predicted_TND + error_TD.unsqueeze(1) * factors_TN.unsqueeze(2)
        if self._per_layer is not None and step.own_TP is not None:
            output_TD = corrected_TND[:, active].contiguous()
            if self._altup.scales_output:
                output_TD = output_TD * self._output_scale_D
            corrected_TND[:, 1:] += self._per_layer.forward(output_TD, step.own_TP).unsqueeze(1)
        x_TND.copy_(corrected_TND)

    def _computed(self, x_TD: Tensor, step: LayerStep) -> Tensor:
        """Return the active stream after attention and MLP."""
        normed_TD = self._attention_input_norm(x_TD)
        laurel_TD = normed_TD + self._laurel_norm(self._right(self._left(normed_TD)))
        attended_TD = self._attention.forward(
            normed_TD, step.positions_T, step.tables, *step.caches[0]
        )
        x_TD = x_TD + self._attention_output_norm(attended_TD)
        x_TD = (x_TD + laurel_TD) * 0.5**0.5
        return x_TD + self._mlp_output_norm(self._mlp.forward(self._mlp_input_norm(x_TD)))

    def _modalities(self, x_TD: Tensor) -> Tensor:
        """Return the inputs [T, N] of the products that compute the mixing factors of the streams."""
        normed_TD = self._router_norm(x_TD.contiguous()) * self._router_scale
        return self._router(normed_TD).float().tanh().to(x_TD.dtype)
