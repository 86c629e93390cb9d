"""Layers of attention with a memory, and an adaptor (Fun-ASR-Nano), in torch.

Shapes: C features of a row, P rows, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.tower import MemorySpec
from ...loaders import Checkpoint
from ..image_tower import TowerSource
from ..weights import Norm, VisionWeights, attend, find_activation
from .stems import sinusoids

_MARKER = "audio_tower.layers.0.self_attn.fsmn.conv.weight"


class MemoryEncoder:
    """The layers that `spec` describes."""

    def __init__(self, spec: MemorySpec, source: TowerSource) -> None:
        tensors, checkpoint = source.weights(_MARKER, spec.tensor_names), source.checkpoint
        self._spec = spec
        self._input_scale = spec.hidden_size**0.5
        projector, adaptor = "multi_modal_projector.", spec.adaptor
        self._layers = [
            _Layer(
                tensors,
                checkpoint,
                f"audio_tower.layers.{index}.",
                sizes=(
                    spec.num_mel_bins if index == 0 else spec.hidden_size,
                    spec.hidden_size,
                    spec.intermediate_size,
                ),
                num_heads=spec.num_heads,
                activation=spec.activation,
                norm_eps=spec.norm_eps,
                kernel_size=spec.kernel_size,
                is_normed=index in spec.normed_layers,
            )
            for index in range(spec.num_layers)
        ]
        size = spec.output_size
        self._first = tensors.read_linear(
            f"{projector}linear_1", spec.projection_size, spec.hidden_size
        )
        self._second = tensors.read_linear(f"{projector}linear_2", size, spec.projection_size)
        self._activation = find_activation(checkpoint, spec.projection_activation)
        self._last_layers = [
            _Layer(
                tensors,
                checkpoint,
                f"{projector}layers.{index}.",
                sizes=(size, size, adaptor.intermediate_size),
                num_heads=adaptor.num_heads,
                activation=adaptor.activation,
                norm_eps=adaptor.norm_eps,
            )
            for index in range(adaptor.num_layers)
        ]

    def __call__(self, features_CP: Tensor) -> Tensor:
        """Return the outputs [P, output size]."""
        x = features_CP.T
        positions_P = torch.arange(1, len(x) + 1)
        x = x * self._input_scale + sinusoids(positions_P, x.shape[1]).to(x)
        for layer in self._layers:
            x = layer(x)
        x = self._second(self._activation(self._first(x)))
        for layer in self._last_layers:
            x = layer(x)
        return x[: self._spec.num_outputs(len(x))]


class _Layer:
    """A layer that turns rows of the first of `sizes` into rows of the second. The third is that of its MLP."""

    def __init__(
        self,
        tensors: VisionWeights,
        checkpoint: Checkpoint,
        prefix: str,
        *,
        sizes: tuple[int, int, int],
        num_heads: int,
        activation: str,
        norm_eps: float,
        kernel_size: int = 0,
        is_normed: bool = False,
    ) -> None:
        inputs, size, inner = sizes
        attention = f"{prefix}self_attn."
        self._num_heads, self._kernel_size = num_heads, kernel_size
        self._is_residual = inputs == size
        self._activation = find_activation(checkpoint, activation)
        if f"{attention}qkv_proj.weight" in tensors:
            self._qkv = tensors.read_linear(f"{attention}qkv_proj", 3 * size, inputs).split(3)
        else:
            self._qkv = [
                tensors.read_linear(f"{attention}{name}_proj", size, inputs) for name in "qkv"
            ]
        self._output = tensors.read_linear(f"{attention}o_proj", size, size)
        self._taps: Tensor | None = None
        if kernel_size:
            self._taps = tensors.read(f"{attention}fsmn.conv.weight", size, 1, kernel_size)
        self._up = tensors.read_linear(f"{prefix}mlp.fc1", inner, size)
        self._down = tensors.read_linear(f"{prefix}mlp.fc2", size, inner)
        self._before = tensors.read_layer_norm(f"{prefix}input_layernorm", inputs, norm_eps)
        self._between = tensors.read_layer_norm(f"{prefix}post_attention_layernorm", size, norm_eps)
        self._after: Norm | None = None
        if is_normed:
            self._after = tensors.read_layer_norm(f"{prefix}final_layernorm", size, norm_eps)

    def __call__(self, x_PD: Tensor) -> Tensor:
        attended = self._attend(self._before(x_PD))
        x_PD = x_PD + attended if self._is_residual else attended
        x_PD = x_PD + self._down(self._activation(self._up(self._between(x_PD))))
        return x_PD if self._after is None else self._after(x_PD)

    def _attend(self, x_PD: Tensor) -> Tensor:
        q, k, v = (linear(x_PD) for linear in self._qkv)
        x = self._output(attend(q, k, v, self._num_heads))
        if self._taps is None:
            return x
        before = (self._kernel_size - 1) // 2
        padded_DP = F.pad(v.T, (before, self._kernel_size - 1 - before))
        return x + v + F.conv1d(padded_DP[None], self._taps, groups=len(self._taps))[0].T
