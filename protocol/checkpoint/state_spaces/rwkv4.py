"""The recurrent layer of RWKV-4, and its description in configs."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ..config_fields import ConfigFields
from .state_size import StatePart, StateParts


class Rwkv4(msgspec.Struct, frozen=True, tag=True):
    """The time mixing of RWKV-4 (Peng et al., 2023, arXiv 2305.13048): means of values, weighted by keys and ages.

    The state of a channel is a numerator, a denominator and the logarithm of their scale. For the next token, the
    inputs of the time mixing and of the MLP are also stored, with `hidden_size` elements each.
    """

    # The logarithm of the scale depends on one token after the other.
    segment: ClassVar[int] = 1
    kernel: ClassVar[int] = 2
    shifts_mlp: ClassVar[bool] = True
    num_channels: int
    hidden_size: int

    @property
    def num_units(self) -> int:
        """Number of parts that can be divided equally among ranks."""
        return self.num_channels

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`."""
        recurrent = (StatePart(self.num_channels, 1, runs=3),)
        return StateParts(recurrent, self.kernel - 1, (StatePart(1, 2 * self.hidden_size),))


def read_rwkv4(fields: ConfigFields) -> Rwkv4:
    """Return the recurrent layer of an RWKV-4."""
    size = fields.integer("hidden_size")
    return Rwkv4(fields.integer("attention_hidden_size", size), size)
