"""Plan the passes of block-diffusion models, which fill whole blocks of tokens (arXiv 2503.09573).

A pass of a request computes its known tokens that are not computed yet, and its current block: known tokens and masks
up to the next block boundary. The workers keep what passes have fixed in the block, and report its tokens when it is
full. The keys and values of a block depend on all of its tokens. So those of the current block count only once its
tokens are known and have been computed again, together with the next block.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import overload

import numpy as np

from ...protocol.arrays import BoolArray, Int64Array
from ...protocol.config.diffusion import BlockDiffusion
from .batch import ScheduledRow
from .request import Request
from .slots import SlotArray, Slots


class DiffusionBlocks:
    """The arithmetic of blocks, and the requests that have not got their first block.

    `num_computed_tokens` of a slot is always a multiple of the block size.
    """

    def __init__(self, config: BlockDiffusion, slots: Slots) -> None:
        self.block_size = config.block_size
        self._slots = slots
        self._without_tokens: list[ScheduledRow] = []

    @overload
    def end_of_pass(self, num_known: int) -> int: ...
    @overload
    def end_of_pass(self, num_known: Int64Array) -> Int64Array: ...
    def end_of_pass(self, num_known: int | Int64Array) -> int | Int64Array:
        """Return the end of the block that a request with `num_known` tokens fills next."""
        return num_known - num_known % self.block_size + self.block_size

    def count_needed(self, slots: SlotArray) -> Int64Array:
        """Return how many tokens a pass of each slot computes; 0 if its last pass is in flight."""
        state = self._slots
        known = state.num_known_tokens(slots)
        is_idle = state.num_expected_tokens[slots] == known
        needed = self.end_of_pass(known) - state.num_computed_tokens[slots]
        return np.where(is_idle, needed, 0)

    def whole_blocks(self, granted: Int64Array) -> Int64Array:
        """Reduce granted tokens to whole blocks."""
        return granted - granted % self.block_size

    def count_certain(self, computed: Int64Array, samples: BoolArray) -> Int64Array:
        """Return how many of the `computed` tokens of each row are certain: those before the block of a pass."""
        return np.where(samples, computed - self.block_size, computed)

    def count_masks(self, slots: SlotArray) -> Int64Array:
        """Return how many tokens the current block of each slot lacks."""
        known = self._slots.num_known_tokens(slots)
        return self.end_of_pass(known) - known

    def apply_counts(self, slots: SlotArray, counts: Int64Array) -> None:
        """Record that passes of these slots ended, with `counts` new tokens each."""
        self._slots.num_expected_tokens[slots] += counts - 1

    def take_prefilled(
        self, rows: Iterable[ScheduledRow], sampled: Container[Request]
    ) -> list[ScheduledRow]:
        """Add the rows of a step that began first passes. Return all such rows whose requests sampled in this step."""
        waiting = [row for row in (*self._without_tokens, *rows) if row.is_awaited]
        self._without_tokens = [row for row in waiting if row.request not in sampled]
        return [row for row in waiting if row.request in sampled]
