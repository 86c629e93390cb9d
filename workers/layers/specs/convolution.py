"""The description of a convolution as data."""

from typing import Literal

import msgspec


class ConvolutionSpec(msgspec.Struct, frozen=True):
    """A convolution over the time of an audio clip, with `padding` zeros on both sides, and its activation.

    If `has_group_norm`, the result is normed over all channels and times. With the activation "glu", the second half of
    the channels are gates of the first one.
    """

    name: str
    channels: int
    kernel: int
    stride: int
    padding: int = 0
    has_bias: bool = True
    activation: Literal["gelu", "tanh", "glu"] = "gelu"
    has_group_norm: bool = False
