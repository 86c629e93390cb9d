"""The description of convolutions, and of biases by distance, as data."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A convolution over the time of an audio clip, with `padding` zeros on both sides, and its activation.

    If `has_group_norm`, the result is normed over all channels and times.
    """

    name: str
    channels: int
    kernel: int
    stride: int
    padding: int = 0
    has_bias: bool = True
    activation: Literal["gelu", "tanh"] = "gelu"
    has_group_norm: bool = False


@dataclass(frozen=True, slots=True)
class RelativeBiasSpec:
    """Biases of attention scores that depend on the query and on the distance to the key (Inkling).

    Each query head projects the hidden state to `rank` elements. Their products with a stored matrix are the biases of
    the keys at the distances 0 to `max_distance` - 1; in a layer with a window, to the last key in it. They are scaled
    like queries.
    """

    rank: int
    max_distance: int
