"""Plan the passes of block-diffusion models, which fill whole blocks of tokens (arXiv 2503.09573).

A pass of a request computes its known tokens that are not computed yet, and its current block. The workers keep what
passes have fixed in the block, and report its tokens when it is full. The keys and values of a block depend on all of
its tokens. So those of the current block count only once its tokens are known and have been computed again, together
with the next block.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import numpy as np

from ...protocol.arrays import Int64Array
from .batch import ScheduledRow
from .passes import Count, Passes
from .request import Request
from .slots import SlotArray, Slots


class BlockPasses(Passes):
    """Passes over blocks of masks, which begin at multiples of the block size.

    The first block of an answer contains the last tokens of the prompt. `num_computed_tokens` of a slot is always a
    multiple of the block size.
    """

    min_new_tokens = 0

    def __init__(self, block_size: int, slots: Slots) -> None:
        super().__init__(slots)
        self.smallest = self.block_size = block_size
        self._without_tokens: list[ScheduledRow] = []
        """The rows of requests that have not got their first block."""

    def find_end(self, num_tokens: Count, num_prompt_tokens: Count) -> Count:
        """Return the end of the block that a request with `num_tokens` known ones fills next."""
        return num_tokens - num_tokens % self.block_size + self.block_size

    def find_block_end(self, num_tokens: Count, num_prompt_tokens: Count) -> Count:
        """Return the number of tokens of a request once the block after `num_tokens` known ones is complete."""
        return self.find_end(num_tokens, num_prompt_tokens)

    def count_needed(self, slots: SlotArray, computed: Int64Array, most: Int64Array) -> Int64Array:
        """Return how many tokens a pass of each slot computes; 0 if its last pass is in flight."""
        known = self.slots.num_known_tokens(slots)
        is_idle = self.slots.num_expected_tokens[slots] == known
        ends = self.find_end(known, self.slots.num_prompt_tokens(slots))
        return np.where(is_idle, ends - computed, 0)

    def fit(self, granted: Count, needed: Count) -> Count:
        """Reduce granted tokens to whole blocks."""
        return granted - granted % self.block_size

    def count_certain(
        self, computed: Int64Array, granted: Int64Array, needed: Int64Array
    ) -> Int64Array:
        """Return how many of the first `computed` tokens are before the block of a pass."""
        is_pass = (granted > 0) & (granted == needed)
        return np.where(is_pass, computed - self.block_size, computed)

    def count_extra(self, slots: SlotArray) -> Int64Array:
        """Return how many tokens beside one the current block of each slot lacks."""
        known = self.slots.num_known_tokens(slots)
        return self.find_block_end(known, self.slots.num_prompt_tokens(slots)) - known - 1

    def apply_counts(self, slots: SlotArray, counts: Int64Array) -> None:
        """Record that passes of these slots ended, with `counts` new tokens each."""
        self.slots.num_expected_tokens[slots] += counts - 1

    def take_prefilled(
        self, rows: Iterable[ScheduledRow], sampled: Container[Request]
    ) -> list[ScheduledRow]:
        """Add the rows of a step that began first passes. Return all such rows whose requests sampled in this step."""
        waiting = [row for row in (*self._without_tokens, *rows) if row.is_awaited]
        self._without_tokens = [row for row in waiting if row.request not in sampled]
        return [row for row in waiting if row.request in sampled]


class CanvasPasses(BlockPasses):
    """Passes over canvases, which begin after the last known token. The tokens before one can be computed in parts."""

    def find_end(self, num_tokens: Count, num_prompt_tokens: Count) -> Count:
        """Return the end of the canvas that a request with `num_tokens` known ones fills next."""
        return num_tokens + self.block_size

    def fit(self, granted: Count, needed: Count) -> Count:
        """Reduce granted tokens to those before the canvas, unless they are the whole pass."""
        excess = granted - (needed - self.block_size)
        return granted - (granted < needed) * (excess > 0) * excess


class AnswerPasses(BlockPasses):
    """Passes over whole answers, which end after a multiple of `answer_size` tokens.

    A pass computes the prompt and all tokens of the answer, most of which are masks. It fixes tokens of one block,
    which begins at a multiple of the block size after the prompt. As all keys depend on all tokens, none is certain.
    """

    def __init__(self, block_size: int, answer_size: int, slots: Slots) -> None:
        super().__init__(block_size, slots)
        self.answer_size = answer_size

    def find_end(self, num_tokens: Count, num_prompt_tokens: Count) -> Count:
        """Return the end of the masks after `num_tokens` known tokens."""
        return num_tokens - (num_tokens - num_prompt_tokens) % self.answer_size + self.answer_size

    def find_block_end(self, num_tokens: Count, num_prompt_tokens: Count) -> Count:
        """Return the number of tokens of a request once the block after `num_tokens` known ones is complete."""
        return num_tokens - (num_tokens - num_prompt_tokens) % self.block_size + self.block_size

    def fit(self, granted: Count, needed: Count) -> Count:
        """Reduce granted tokens to none, unless they are the whole pass."""
        return granted * (granted >= needed)

    def count_certain(
        self, computed: Int64Array, granted: Int64Array, needed: Int64Array
    ) -> Int64Array:
        """Return zeros, because every pass computes all tokens again."""
        return np.zeros_like(computed)
