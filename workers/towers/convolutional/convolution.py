"""Convolutions over the places of an image, and chains of such steps.

Shapes: H rows and W columns of places, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from torch import Tensor
from torch.nn import functional as F

Block: TypeAlias = Callable[[Tensor], Tensor]
"""Maps the channels of places, [H, W, C], to those of as many places or fewer."""


class Convolution:
    """A convolution whose output has a place for every `stride` places of the input, in each direction.

    Args:
        weight: The kernel, [outputs, inputs, side, side], with one input if each channel is convolved by itself.
        bias: The bias of each output, or None.
        stride: The distance of the input places.
        is_centered: True if the input is padded with `side // 2` zeros at both ends. Otherwise it is padded with as few
            as possible, and if their number is odd with one more at the end.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int = 1,
        *,
        is_centered: bool = False,
    ) -> None:
        self._weight, self._bias, self._stride = weight, bias, stride
        self._is_centered = is_centered

    def __call__(self, x_HWC: Tensor) -> Tensor:
        """Return the convolved channels."""
        padding: list[int] = []
        side, stride = self._weight.shape[-1], self._stride
        for length in (x_HWC.shape[1], x_HWC.shape[0]):
            missing = max((-(-length // stride) - 1) * stride + side - length, 0)
            first = side // 2 if self._is_centered else missing // 2
            padding += [first, first if self._is_centered else missing - first]
        # This is a view, whose channels stay the dimension that is contiguous in memory.
        x = F.pad(x_HWC, (0, 0, *padding)).permute(2, 0, 1)[None]
        groups = x.shape[1] // self._weight.shape[1]
        x = F.conv2d(x, self._weight, self._bias, stride, groups=groups)
        return x[0].permute(1, 2, 0)


def chained(steps: Iterable[Block], x_HWC: Tensor) -> Tensor:
    """Return the result of steps, each of which reads the result of the one before."""
    for step in steps:
        x_HWC = step(x_HWC)
    return x_HWC
