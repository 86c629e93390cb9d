"""A Fast Conformer (Canary), with a projection of its outputs (Cohere Transcribe) or a decoder (Parakeet), in torch.

Shapes: C features of a frame, N frames, P rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.tower import FastConformerSpec
from ..image_tower import TowerSource
from ..weights import VisionWeights, activation
from .conformer_layers import ConformerStack
from .token_decoders import TokenDecoder, read_token_decoder

_NORM_EPS = 1e-5
_MARKER = "encoder.subsampling.linear.weight"


class FastConformer:
    """The conformer and the projection, if there is one."""

    def __init__(self, spec: FastConformerSpec, source: TowerSource) -> None:
        tensors, checkpoint = source.weights(_MARKER, spec.tensor_names), source.checkpoint
        self._spec = spec
        self._convolutions: list[tuple[Tensor, Tensor, int, bool]] = []
        channels = spec.conv_channels

        def convolution(index: int, inputs: int, kernel: int, groups: int = 1) -> None:
            name = f"encoder.subsampling.layers.{index}"
            weight = tensors.read(f"{name}.weight", channels, inputs, kernel, kernel)
            bias = tensors.read(f"{name}.bias", channels)
            # Depthwise convolutions are followed by one with a kernel of 1, and no activation.
            self._convolutions.append((weight, bias, groups, groups == 1))

        convolution(0, 1, 3)
        for number in range(spec.num_halvings - 1):
            convolution(3 * number + 2, 1, 3, channels)
            convolution(3 * number + 3, channels, 1)
        num_features = spec.num_mel_bins >> spec.num_halvings
        self._input = tensors.read_linear(
            "encoder.subsampling.linear", spec.layers.hidden_size, channels * num_features
        )
        self._layers = ConformerStack(spec.layers, tensors, checkpoint, "encoder.")
        self._output: Callable[[Tensor], Tensor] | None = None
        if spec.projection_size:
            self._output = _Projection(spec, tensors)
        elif spec.has_projection:
            self._output = tensors.read_linear(
                "decoder.proj", spec.output_size, spec.layers.hidden_size
            )
        self._decoder: TokenDecoder | None = None
        if spec.decoder is not None:
            size = spec.layers.hidden_size
            self._decoder = read_token_decoder(spec.decoder, size, tensors, checkpoint)

    def __call__(self, features_CN: Tensor) -> Tensor:
        """Return the outputs [P, output size], or with a decoder the tokens [R, `TOKEN_FIELDS`]."""
        x = features_CN.T[None, None]
        for weight, bias, groups, is_activated in self._convolutions:
            is_pointwise = weight.shape[-1] == 1
            stride, padding = (1, 0) if is_pointwise else (2, 1)
            x = F.conv2d(x, weight, bias, stride, padding, groups=groups)
            x = F.relu(x) if is_activated else x
        x_PD = self._input(x[0].transpose(0, 1).flatten(1)) * self._spec.input_scale
        num_read = len(x_PD)
        if self._spec.num_outputs(features_CN.shape[1]) > num_read:
            # The last row is that of features which are 0 after each convolution.
            zeros_D = torch.zeros_like(x_PD[:1])
            bias_D = zeros_D if self._input.bias is None else self._input.bias[None]
            x_PD = torch.cat((x_PD, bias_D * self._spec.input_scale))
        x_PD = self._layers(x_PD, num_read)
        if self._decoder is not None:
            return self._decoder(x_PD)
        return x_PD if self._output is None else self._output(x_PD)


class _Projection:
    """A norm and two matrices."""

    def __init__(self, spec: FastConformerSpec, tensors: VisionWeights) -> None:
        size, inner = spec.layers.hidden_size, spec.projection_size
        has_bias = spec.has_projection_bias
        kind: Literal["rms", "layer"] = "rms" if spec.projection_activation == "relu2" else "layer"
        self._norm = tensors.read_norm("projection.norm", size, kind, _NORM_EPS)
        self._first = tensors.read_linear("projection.linear1", inner, size, has_bias=has_bias)
        self._second = tensors.read_linear(
            "projection.linear2", spec.output_size, inner, has_bias=has_bias
        )
        self._activation = activation(spec.projection_activation)

    def __call__(self, x_PD: Tensor) -> Tensor:
        return self._second(self._activation(self._first(self._norm(x_PD))))
