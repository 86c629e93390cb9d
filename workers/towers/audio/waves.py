"""Causal convolutional encoders of samples, and the projections of their outputs (VibeVoice ASR), in torch.

Shapes: L samples, N rows of a stage, C channels, P outputs.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.samples import WaveEncoder, WaveSpec
from ...loaders import Checkpoint
from ..image_tower import TowerSource
from ..weights import VisionWeights, find_activation

_MARKER: Final = "acoustic_tokenizer_encoder.stem.conv.conv.weight"
_OUTPUTS_AT_ONCE: Final = 16
_PROJECTION_EPS: Final = 1e-6


class WaveEncoders:
    """Both encoders, and the sum of their projected outputs."""

    def __init__(self, spec: WaveSpec, source: TowerSource) -> None:
        tensors, checkpoint = source.weights(_MARKER), source.checkpoint
        self._spec = spec
        self._samples_at_once = _OUTPUTS_AT_ONCE * spec.acoustic.hop
        self._encoders = [
            (_Encoder(encoder, tensors, checkpoint, f"{name}_tokenizer_encoder."), project)
            for name, encoder in (("acoustic", spec.acoustic), ("semantic", spec.semantic))
            for project in [_Projection(tensors, name, encoder.hidden_size, spec.output_size)]
        ]

    def __call__(self, samples_1L: Tensor, part: int) -> Tensor:
        """Return the outputs [P, output size] of a part of a clip. Parts after the first begin with earlier samples."""
        hop = self._spec.acoustic.hop
        filled_1L = F.pad(samples_1L, (0, -samples_1L.shape[1] % hop))
        states: list[list[Tensor]] = [[] for _ in self._encoders]
        outputs = []
        # Few samples at a time need less memory. Each convolution continues after the samples before.
        for some_1L in filled_1L.split(self._samples_at_once, 1):
            found = []
            for (encode, project), state in zip(self._encoders, states, strict=True):
                found.append(project(encode(some_1L, state)))
            outputs.append(found[0] + found[1])
        return torch.cat(outputs)[self._spec.outputs_before if part else 0 :]


class _Projection:
    def __init__(self, tensors: VisionWeights, name: str, columns: int, size: int) -> None:
        prefix = f"multi_modal_projector.{name}_"
        self._first = tensors.read_linear(f"{prefix}linear_1", size, columns)
        self._norm = tensors.read_rms_norm(f"{prefix}norm", size, _PROJECTION_EPS)
        self._second = tensors.read_linear(f"{prefix}linear_2", size, size)

    def __call__(self, x_PC: Tensor) -> Tensor:
        return self._second(self._norm(self._first(x_PC)))


class _Encoder:
    def __init__(
        self, spec: WaveEncoder, tensors: VisionWeights, checkpoint: Checkpoint, prefix: str
    ) -> None:
        self._stages: list[tuple[_Convolution, list[_Block]]] = []
        taps, channels = spec.kernel_size, spec.num_filters
        name, convolution = "stem.", _Convolution(tensors, f"{prefix}stem.conv.", 1, channels, taps)
        for stage, depth in enumerate(spec.depths):
            if stage:
                name, ratio = f"conv_layers.{stage - 1}.", spec.ratios[stage - 1]
                convolution = _Convolution(
                    tensors, f"{prefix}{name}conv.", channels, 2 * channels, 2 * ratio, ratio
                )
                channels *= 2
            blocks = [
                _Block(spec, tensors, checkpoint, f"{prefix}{name}stage.{index}.", channels)
                for index in range(depth)
            ]
            self._stages.append((convolution, blocks))
        self._head = _Convolution(tensors, f"{prefix}head.", channels, spec.hidden_size, taps)

    def __call__(self, samples_1L: Tensor, state: list[Tensor]) -> Tensor:
        """Return the outputs [P, hidden size] of samples after those of `state`, which is changed."""
        # Convolutions are called in the order in which they have left their last rows.
        before = iter(state.copy())
        state.clear()
        x_CN = samples_1L
        for convolve, blocks in self._stages:
            x_CN = convolve(x_CN, next(before, None), state)
            for block in blocks:
                x_CN = block(x_CN, next(before, None), state)
        return self._head(x_CN, next(before, None), state).T


class _Convolution:
    def __init__(
        self,
        tensors: VisionWeights,
        prefix: str,
        inputs: int,
        outputs: int,
        taps: int,
        stride: int = 1,
        groups: int = 1,
    ) -> None:
        name = f"{prefix}conv."
        self._weight = tensors.read(f"{name}weight", outputs, inputs // groups, taps)
        self._bias = tensors.read(f"{name}bias", outputs)
        self._stride, self._groups, self._num_before = stride, groups, taps - stride

    def __call__(self, x_CN: Tensor, before_CN: Tensor | None, state: list[Tensor]) -> Tensor:
        """Return the output after the rows `before_CN`, or after zeros, and append the last rows to `state`."""
        if before_CN is None:
            before_CN = x_CN.new_zeros(len(x_CN), self._num_before)
        x_CN = torch.cat((before_CN, x_CN), 1)
        state.append(x_CN[:, x_CN.shape[1] - self._num_before :].clone())
        return F.conv1d(x_CN[None], self._weight, self._bias, self._stride, groups=self._groups)[0]


class _Block:
    def __init__(
        self,
        spec: WaveEncoder,
        tensors: VisionWeights,
        checkpoint: Checkpoint,
        prefix: str,
        channels: int,
    ) -> None:
        inner, eps = spec.expansion * channels, spec.norm_eps
        self._norm = tensors.read_rms_norm(f"{prefix}norm", channels, eps)
        self._mlp_norm = tensors.read_rms_norm(f"{prefix}ffn_norm", channels, eps)
        self._mix = _Convolution(
            tensors, f"{prefix}mixer.", channels, channels, spec.kernel_size, groups=channels
        )
        self._up = tensors.read_linear(f"{prefix}ffn.linear1", inner, channels)
        self._down = tensors.read_linear(f"{prefix}ffn.linear2", channels, inner)
        self._activation = find_activation(checkpoint, spec.activation)
        self._scale_C = tensors.read(f"{prefix}gamma", channels)
        self._mlp_scale_C = tensors.read(f"{prefix}ffn_gamma", channels)

    def __call__(self, x_CN: Tensor, before_CN: Tensor | None, state: list[Tensor]) -> Tensor:
        x_CN = x_CN + self._mix(self._norm(x_CN.T).T, before_CN, state) * self._scale_C[:, None]
        x_NC = x_CN.T
        mlp_NC = self._down(self._activation(self._up(self._mlp_norm(x_NC))))
        return (x_NC + mlp_NC * self._mlp_scale_C).T
