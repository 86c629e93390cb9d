"""The recurrent layer of Griffin."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from .state_size import StatePart, StateParts


class RgLru(msgspec.Struct, frozen=True, tag=True):
    """A real-gated linear recurrent unit (Griffin, De et al., 2024, arXiv 2402.19427), after a convolution.

    Each channel has one number as its state. The gates of its input and of its decay are products of a matrix for each
    of `num_blocks` blocks of channels.
    """

    # As in `Mamba1`, gates are products of a token's convolved input.
    segment: ClassVar[int] = 1
    channels: int
    num_blocks: int
    kernel: int

    @property
    def num_units(self) -> int:
        """Number of parts that can be divided equally among ranks."""
        return self.num_blocks

    @property
    def block_size(self) -> int:
        """Number of channels in a block."""
        return self.channels // self.num_blocks

    @property
    def state_parts(self) -> StateParts:
        """See `StateParts`."""
        blocks = StatePart(self.num_blocks, self.block_size)
        return StateParts((blocks,), self.kernel - 1, (blocks,))
