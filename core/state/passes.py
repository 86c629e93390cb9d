"""The tokens that a step computes of each request, and those that it may add."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from ...protocol.arrays import Int64Array
from .slots import SlotArray, Slots

Count = TypeVar("Count", int, Int64Array)


class Passes:
    """The passes of models that generate token by token. A pass computes all known tokens, and samples the next one.

    A step may compute a part of a request's tokens instead, and then samples nothing.
    """

    smallest = 0
    """The number of tokens of the smallest pass, which a step with other requests must have space for."""
    min_new_tokens = 1
    """The minimum number of tokens that a pass adds."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots

    def find_end(self, num_tokens: Count, num_prompt_tokens: Count) -> Count:
        """Return the number of tokens after a pass of a request with `num_tokens` known ones."""
        return num_tokens

    def count_needed(self, slots: SlotArray, computed: Int64Array, most: Int64Array) -> Int64Array:
        """Return how many tokens a pass of each slot computes, up to the position `most`; 0 if none is possible."""
        needed = np.minimum(self.slots.num_expected_tokens[slots], most)
        needed -= computed
        return needed

    def fit(self, granted: Count, needed: Count) -> Count:
        """Reduce granted tokens to numbers that a step can compute, given those of a whole pass."""
        return granted

    def count_certain(
        self, computed: Int64Array, granted: Int64Array, needed: Int64Array
    ) -> Int64Array:
        """Return how many of the first `computed` tokens have final keys, if `granted` of them are computed now."""
        return computed

    def count_extra(self, slots: SlotArray) -> Int64Array | None:
        """Return how many tokens beside the first a pass of each slot may add; None if never any."""
        return None
