"""A conformer whose queries, keys and values have their own norms (FireRedASR2), in torch.

Shapes: C features of a frame, N frames, P rows, D hidden size, F distances.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.tower import RelativeConformerSpec
from ..image_tower import TowerSource
from ..weights import VisionWeights
from .conformer_layers import attend_by_distance, distance_embeddings

_MARKER: Final = "encoder.input_preprocessor.conv.0.weight"
_KERNEL: Final = 3
_FRAMES_AFTER: Final = 6
"""The silent frames after a clip, which complete its last row."""

_NORM_EPS: Final = 1e-5


class RelativeConformer:
    """The conformer and the projection that `spec` describes."""

    def __init__(self, spec: RelativeConformerSpec, source: TowerSource) -> None:
        tensors = source.weights(_MARKER)
        self._spec = spec
        size, channels, prefix = spec.hidden_size, spec.conv_channels, "encoder."
        name = f"{prefix}input_preprocessor"
        self._convolutions = [
            (
                tensors.read(f"{name}.conv.{index}.weight", channels, inputs, _KERNEL, _KERNEL),
                tensors.read(f"{name}.conv.{index}.bias", channels),
            )
            for index, inputs in ((0, 1), (2, channels))
        ]
        num_features = ((spec.num_mel_bins - 1) // 2 - 1) // 2
        self._input = tensors.read_linear(f"{name}.out", size, channels * num_features)
        self._layers = [
            _Layer(spec, tensors, f"{prefix}layer_stack.{index}.")
            for index in range(spec.num_layers)
        ]
        rows, output = spec.rows_per_output, spec.output_size
        self._first = tensors.read_linear("encoder_projector.linear1", output, rows * size)
        self._second = tensors.read_linear("encoder_projector.linear2", output, output)

    def __call__(self, features_CN: Tensor) -> Tensor:
        """Return the outputs [outputs, output size]."""
        x = F.pad(features_CN, (0, _FRAMES_AFTER)).T[None, None]
        for weight, bias in self._convolutions:
            x = F.relu(F.conv2d(x, weight, bias, 2))
        x_PD = self._input(x[0].transpose(0, 1).flatten(1))
        positions_FD = distance_embeddings(len(x_PD), x_PD.shape[1]).to(x_PD)
        for layer in self._layers:
            x_PD = layer(x_PD, positions_FD)
        rows = self._spec.rows_per_output
        joined = x_PD[: len(x_PD) // rows * rows].reshape(-1, rows * x_PD.shape[1])
        return self._second(F.relu(self._first(joined)))


class _Layer:
    def __init__(self, spec: RelativeConformerSpec, tensors: VisionWeights, prefix: str) -> None:
        self._spec = spec
        size, inner = spec.hidden_size, spec.intermediate_size
        self._mlps = [
            (
                tensors.read_layer_norm(f"{prefix}{name}.net.0", size, _NORM_EPS),
                tensors.read_linear(f"{prefix}{name}.net.1", inner, size),
                tensors.read_linear(f"{prefix}{name}.net.4", size, inner),
            )
            for name in ("ffn1", "ffn2")
        ]
        attention = f"{prefix}mhsa."
        self._qkv = [
            (
                tensors.read_layer_norm(f"{attention}layer_norm_{name}", size, _NORM_EPS),
                tensors.read_linear(f"{attention}w_{name}s", size, size, has_bias=False),
            )
            for name in "qkv"
        ]
        self._output = tensors.read_linear(f"{attention}fc", size, size, has_bias=False)
        self._distances = tensors.read_linear(f"{attention}linear_pos", size, size, has_bias=False)
        shape = spec.num_heads, size // spec.num_heads
        self._biases = [
            tensors.read(f"{attention}pos_bias_{name}", *shape)[:, None] for name in "uv"
        ]
        convolution = f"{prefix}conv."
        self._before_conv = tensors.read_layer_norm(f"{convolution}pre_layer_norm", size, _NORM_EPS)
        self._up = tensors.read_linear(
            f"{convolution}pointwise_conv1", 4 * size, size, has_bias=False
        )
        self._taps = tensors.read(
            f"{convolution}depthwise_conv.weight", 2 * size, 1, spec.kernel_size
        )
        self._after_taps = tensors.read_layer_norm(f"{convolution}batch_norm", 2 * size, _NORM_EPS)
        self._down = tensors.read_linear(
            f"{convolution}pointwise_conv2", size, 2 * size, has_bias=False
        )
        self._last = tensors.read_layer_norm(f"{prefix}layer_norm", size, _NORM_EPS)

    def __call__(self, x_PD: Tensor, positions_FD: Tensor) -> Tensor:
        x_PD = x_PD + 0.5 * self._mlp(x_PD, 0)
        x_PD = x_PD + self._attend(x_PD, positions_FD)
        x_PD = x_PD + self._convolve(self._before_conv(x_PD))
        return self._last(x_PD + 0.5 * self._mlp(x_PD, 1))

    def _mlp(self, x_PD: Tensor, index: int) -> Tensor:
        norm, up, down = self._mlps[index]
        return down(F.silu(up(norm(x_PD))))

    def _attend(self, x_PD: Tensor, positions_FD: Tensor) -> Tensor:
        qkv = [linear(norm(x_PD)) for norm, linear in self._qkv]
        content, position = self._biases
        distances_FD = self._distances(positions_FD)
        return self._output(
            attend_by_distance(qkv, distances_FD, content, position, num_read=len(x_PD))
        )

    def _convolve(self, x_PD: Tensor) -> Tensor:
        x_DP = F.glu(self._up(x_PD), 1).T
        padding = (self._spec.kernel_size - 1) // 2
        x_DP = F.conv1d(x_DP[None], self._taps, None, 1, padding, groups=len(self._taps))[0]
        return self._down(F.silu(self._after_taps(x_DP.T)))
