"""The code that all recurrent mixers share.

Shapes: N segments, C tokens of a segment, W inputs before a segment that the convolution reads, F channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...layers.layers import LayerKernels, Linear
from ..weights import Rows, WeightReader
from .states import StateBatch


class Mixer(ABC):
    """A layer that combines tokens through a recurrent state. `projection` is its first product."""

    projection: Linear

    @abstractmethod
    def forward(self, x: Any, memory: Tensor, batch: StateBatch) -> Tensor:
        """Update the requests' states, and return the output [T, D].

        Args:
            x: The layer's input.
            memory: The blocks of the layer, uint8 [blocks, bytes].
            batch: The step's plan for the layer's group.
        """


class CausalConvolution:
    """A convolution of each channel over the last tokens, or over those at multiples of `distance`, in float32."""

    def __init__(self, weight_F1K: Tensor, bias_F: Tensor | None, distance: int = 1) -> None:
        self._taps = weight_F1K.float().squeeze(1).T.contiguous().unbind()
        self._bias_F = None if bias_F is None else bias_F.float()
        self._distance = distance

    def __call__(self, x_NXF: Tensor) -> Tensor:
        """Return float32 [N, C, F], the outputs for the last C of the W + C inputs."""
        x_NXF = x_NXF.float()
        length = x_NXF.shape[1] - (len(self._taps) - 1) * self._distance
        y_NCF = x_NXF[:, :length] * self._taps[0]
        for i, tap_F in enumerate(self._taps[1:], 1):
            start = i * self._distance
            y_NCF.addcmul_(x_NXF[:, start : start + length], tap_F)
        return y_NCF if self._bias_F is None else y_NCF.add_(self._bias_F)


class BlockLinear:
    """Products of blocks of channels, each with its own matrix.

    Shapes: T tokens, B blocks, W channels of a block, O outputs of a block.
    """

    def __init__(
        self, weight_BOW: Tensor, bias_BO: Tensor | None, dtype: torch.dtype, kernels: LayerKernels
    ) -> None:
        self._multiply = kernels.grouped_linear(
            [each.to(dtype).contiguous() for each in weight_BOW],
            [] if bias_BO is None else [each.to(dtype) for each in bias_BO],
        )
        self._numbers = torch.arange(1, len(weight_BOW) + 1, device=weight_BOW.device)

    def __call__(self, x_TBW: Tensor) -> Tensor:
        """Return the products [T, B, O]."""
        num_tokens, count = x_TBW.shape[:2]
        ends_B = (self._numbers * num_tokens).to(torch.int32)
        y_XO = self._multiply(x_TBW.transpose(0, 1).flatten(0, 1), ends_B)
        return y_XO.unflatten(0, (count, num_tokens)).transpose(0, 1)


def read_parts(
    weights: WeightReader, name: str, shape: Sequence[int], parts: Sequence[range]
) -> Tensor:
    """Return the concatenation of some ranges of a tensor's rows."""
    return torch.cat([weights.read(name, *shape, part=part) for part in parts])


def segments(name: str, sizes: Sequence[int], parts: Sequence[range]) -> list[Rows]:
    """Return this rank's rows of a module whose outputs are several projections, concatenated."""
    total, start, rows = sum(sizes), 0, []
    for size, part in zip(sizes, parts, strict=True):
        rows.append(Rows(name, total, range(start + part.start, start + part.stop)))
        start += size
    return rows


def elements(heads: range, size: int) -> range:
    """Return the range of elements that belong to these heads, `size` elements each."""
    return range(heads.start * size, heads.stop * size)
