"""Turn log-mel features into the rows that the layers of an audio tower read.

Shapes: C features of a frame, N frames, P rows, D hidden size of the tower.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.tower import AudioChunks, AudioTowerSpec
from ..weights import VisionWeights

_MAX_WAVELENGTH = 10_000


class Stem(Protocol):
    """Turns the features of a window into rows."""

    def __call__(self, features_CN: Tensor, window: int) -> Tensor:
        """Return the rows [P, D] that the tower's layers read, for a window of this number in its clip."""


def make_stem(spec: AudioTowerSpec, tensors: VisionWeights) -> Stem:
    """Return the stem of a tower."""
    if spec.chunks is not None:
        return ChunkStem(spec, spec.chunks, tensors)
    return FrameStem(spec, tensors)


def stem_marker(spec: AudioTowerSpec) -> str:
    """Return the name of a tensor that only the stem of this tower has."""
    return f"audio_tower.{'conv1' if spec.chunks is None else 'conv2d1'}.weight"


class FrameStem:
    """Two convolutions over frames, the second of which reads every other frame, and positions (Whisper).

    Positions are learned or sinusoids. There are none if the layers rotate queries and keys.
    """

    def __init__(self, spec: AudioTowerSpec, tensors: VisionWeights) -> None:
        size = spec.hidden_size
        self._spec = spec
        self._convolutions = [
            (
                tensors.read(f"audio_tower.{name}.weight", size, columns, 3),
                tensors.read(f"audio_tower.{name}.bias", size),
            )
            for name, columns in (("conv1", spec.num_mel_bins), ("conv2", size))
        ]
        self._positions_PD: Tensor | None = None
        if spec.has_sinusoids:
            positions = sinusoids(torch.arange(spec.num_frames // 2), size)
            self._positions_PD = positions.to(self._convolutions[0][0])
        elif spec.rotary is None:
            self._positions_PD = tensors.read(
                "audio_tower.embed_positions.weight", spec.num_frames // 2, size
            )

    def __call__(self, features_CN: Tensor, window: int) -> Tensor:
        """Return the rows [P, D] that the tower's layers read."""
        x_DN = features_CN[None]
        for stride, (weight, bias) in enumerate(self._convolutions, 1):
            x_DN = F.gelu(F.conv1d(x_DN, weight, bias, stride=stride, padding=1))
        num_rows = x_DN.shape[2] - self._spec.frames_after // 2
        x_PD = x_DN[0].T[:num_rows]
        return x_PD if self._positions_PD is None else x_PD + self._positions_PD[:num_rows]


class ChunkStem:
    """Three convolutions over frames and features of each chunk, a projection, and sinusoids as positions.

    There are no positions if the layers rotate queries and keys.
    """

    def __init__(self, spec: AudioTowerSpec, chunks: AudioChunks, tensors: VisionWeights) -> None:
        self._spec, self._chunks = spec, chunks
        channels = chunks.num_channels
        self._convolutions = [
            (
                tensors.read(f"audio_tower.conv2d{number}.weight", channels, columns, 3, 3),
                tensors.read(f"audio_tower.conv2d{number}.bias", channels),
            )
            for number, columns in enumerate((1, channels, channels), 1)
        ]
        num_features = -(-spec.num_mel_bins // 8)
        self._project = tensors.read_linear(
            "audio_tower.conv_out",
            spec.hidden_size,
            channels * num_features,
            has_bias=chunks.has_bias,
        )
        self._positions_PD: Tensor | None = None
        if spec.rotary is None:
            positions = sinusoids(torch.arange(-(-chunks.num_frames // 8)), spec.hidden_size)
            self._positions_PD = positions.to(self._project.weight)

    def __call__(self, features_CN: Tensor, window: int) -> Tensor:
        """Return the rows [P, D] that the tower's layers read."""
        num_rows = self._spec.num_rows(features_CN.shape[1])
        if not num_rows:
            return features_CN.new_empty(0, self._spec.hidden_size)
        length = self._chunks.num_frames
        if self._spec.silence == "cut" or not (window or self._chunks.fills_first):
            length = min(length, features_CN.shape[1])
        # The last chunk is filled with zeros, whose rows are not returned.
        filled_CN = F.pad(features_CN, (0, -features_CN.shape[1] % length))
        x = filled_CN.unflatten(1, (-1, length)).transpose(0, 1)[:, None]
        for weight, bias in self._convolutions:
            x = F.gelu(F.conv2d(x, weight, bias, stride=2, padding=1))
        rows = self._project(x.permute(0, 3, 1, 2).flatten(2))
        if self._positions_PD is not None:
            rows = rows + self._positions_PD[: rows.shape[1]]
        return rows.flatten(0, 1)[:num_rows]


def sinusoids(positions_P: Tensor, size: int) -> Tensor:
    """Return the sines and then the cosines of each position, float32 [P, size]."""
    step = math.log(_MAX_WAVELENGTH) / max(size // 2 - 1, 1)
    angles = positions_P[:, None] * torch.exp(-step * torch.arange(size // 2).float())
    return torch.cat((angles.sin(), angles.cos()), 1)
