"""The convolutions with which the encoder of a speech model starts.

Shapes: C features of a frame, N frames or samples of a sound, E outputs, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.messages import AudioPayload
from ..layers.spec import SourceSpec
from ..loaders import Checkpoint
from ..vision.weights import VisionWeights

_GROUP_NORM_EPS: Final = 1e-5


class SoundStem:
    """Convolutions over the features or samples of a sound, and the embeddings of positions.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """

    def __init__(
        self, spec: SourceSpec, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
    ) -> None:
        weights = VisionWeights(checkpoint, "encoder.conv1.weight", device, dtype)
        self._prefix = "encoder."
        self._device, self._dtype = device, dtype
        self._convolutions: list[Callable[[Tensor], Tensor]] = []
        channels = spec.num_inputs
        for each in spec.convolutions:
            name = f"{self._prefix}{each.name}"
            weight = weights.read(f"{name}.weight", each.channels, channels, each.kernel)
            bias = weights.read(f"{name}.bias", each.channels) if each.has_bias else None
            self._convolutions.append(_convolution(weight, bias, each.stride, each.padding))
            self._convolutions.append(torch.tanh if each.activation == "tanh" else F.gelu)
            channels = each.channels
            if each.has_group_norm:
                norm = f"{self._prefix}groupnorm"
                scale = weights.read(f"{norm}.weight", channels)
                shift = weights.read(f"{norm}.bias", channels)
                self._convolutions.append(_group_norm(scale, shift))
        self._positions_ED: Tensor | None = None
        if spec.has_positions:
            name = f"{self._prefix}embed_positions.weight"
            self._positions_ED = weights.read(name, spec.max_positions, channels)

    def __call__(self, sound: AudioPayload) -> Tensor:
        """Return the hidden states [E, D] of a sound."""
        kind = torch.float16 if sound.is_float16 else torch.float32
        # Copied, because torch requires a writable array, and the message's bytes are read-only.
        features = torch.frombuffer(bytearray(sound.features), dtype=kind)
        x_CN = features.to(self._device, self._dtype).view(max(sound.num_mel_bins, 1), -1)
        for apply in self._convolutions:
            x_CN = apply(x_CN)
        x_ED = x_CN.T.contiguous()
        if self._positions_ED is not None:
            x_ED += self._positions_ED[: len(x_ED)]
        return x_ED


def _convolution(
    weight: Tensor, bias: Tensor | None, stride: int, padding: int
) -> Callable[[Tensor], Tensor]:
    """Return a convolution as a matrix product, which is several times as fast on a CPU."""
    matrix = weight.flatten(1)
    kernel = weight.shape[2]

    def convolve(x_CN: Tensor) -> Tensor:
        windows_CNK = F.pad(x_CN, (padding, padding)).unfold(1, kernel, stride)
        return F.linear(windows_CNK.transpose(0, 1).flatten(1), matrix, bias).T

    return convolve


def _group_norm(scale: Tensor, shift: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x_CN: F.group_norm(x_CN[None], 1, scale, shift, _GROUP_NORM_EPS)[0]
