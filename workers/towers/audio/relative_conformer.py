"""A conformer after two convolutions, and two matrices (FireRedASR2), in torch.

Shapes: C features of a frame, N frames, P rows, D hidden size.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.tower import RelativeConformerSpec
from ..image_tower import TowerSource
from .conformer_layers import ConformerStack

_STEM: Final = "encoder.input_preprocessor"
_MARKER: Final = f"{_STEM}.conv.0.weight"
_KERNEL: Final = 3
_FRAMES_AFTER: Final = 6
"""The silent frames after a clip, which complete its last row."""


class RelativeConformer:
    """The conformer and the projection that `spec` describes."""

    def __init__(self, spec: RelativeConformerSpec, source: TowerSource) -> None:
        tensors = source.weights(_MARKER, spec.tensor_names)
        self._spec = spec
        size, channels, name = spec.layers.hidden_size, spec.conv_channels, _STEM
        self._convolutions = [
            (
                tensors.read(f"{name}.conv.{index}.weight", channels, inputs, _KERNEL, _KERNEL),
                tensors.read(f"{name}.conv.{index}.bias", channels),
            )
            for index, inputs in ((0, 1), (2, channels))
        ]
        num_features = ((spec.num_mel_bins - 1) // 2 - 1) // 2
        self._input = tensors.read_linear(f"{name}.out", size, channels * num_features)
        self._layers = ConformerStack(spec.layers, tensors, source.checkpoint, "encoder.")
        rows, output = spec.rows_per_output, spec.output_size
        self._first = tensors.read_linear("encoder_projector.linear1", output, rows * size)
        self._second = tensors.read_linear("encoder_projector.linear2", output, output)

    def __call__(self, features_CN: Tensor) -> Tensor:
        """Return the outputs [outputs, output size]."""
        x = F.pad(features_CN, (0, _FRAMES_AFTER)).T[None, None]
        for weight, bias in self._convolutions:
            x = F.relu(F.conv2d(x, weight, bias, 2))
        x_PD = self._layers(self._input(x[0].transpose(0, 1).flatten(1)))
        rows = self._spec.rows_per_output
        joined = x_PD[: len(x_PD) // rows * rows].reshape(-1, rows * x_PD.shape[1])
        return self._second(F.relu(self._first(joined)))
