"""The size of the state of a recurrent layer."""

from __future__ import annotations

from typing import Final

import msgspec

SEGMENT: Final = 16
"""Number of tokens in a segment of most layers."""


class StateSize(msgspec.Struct, frozen=True):
    """The state of one layer in one worker.

    It has `num_recurrent` float32 numbers, and `num_inputs` stored inputs of `channels` elements each. `beside` is the
    state of another part of the layer, stored directly after it.
    """

    num_recurrent: int
    num_inputs: int
    channels: int
    beside: StateSize | None = None

    def num_own_bytes(self, input_bytes: int) -> int:
        """Return the size in bytes without `beside`, if one element of an input takes `input_bytes`."""
        return 4 * self.num_recurrent + self.num_inputs * self.channels * input_bytes

    def num_bytes(self, input_bytes: int) -> int:
        """Return the size of the state in bytes, if one element of an input takes `input_bytes`."""
        beside = 0 if self.beside is None else self.beside.num_bytes(input_bytes)
        return self.num_own_bytes(input_bytes) + beside
