"""Track which blocks have left the attention windows of running requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...protocol.arrays import Int64Array
from ...protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from ..state.slots import SlotArray


class Window:
    """KV-cache groups with the same sliding window. `first_held` is, per slot, the first block inside the window.

    A sliding window also keeps the blocks that a token after the last full block sees. The next turn of a conversation,
    or the same request after a preemption, continues from there.
    """

    def __init__(
        self, spec: KVCacheGroup, groups: list[int], block_size: int, max_num_seqs: int
    ) -> None:
        self.groups = groups
        self.first_held: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._spec = spec
        self._block_size = block_size

    def pop_passed_blocks(
        self, slots: SlotArray, num_computed: Int64Array
    ) -> Iterator[tuple[int, int, int]]:
        """Move the window of each slot to its next token.

        Yields (slot, first block, end) of the blocks that left it.
        """
        if self._spec.kind is not AttentionKind.STATE_SPACE:
            num_computed = num_computed - num_computed % self._block_size
        first = self._spec.first_visible(num_computed) // self._block_size
        held = self.first_held[slots]
        rows = (first > held).nonzero()[0]
        self.first_held[slots[rows]] = first[rows]
        yield from zip(slots[rows].tolist(), held[rows].tolist(), first[rows].tolist(), strict=True)


def make_windows(
    groups: Sequence[KVCacheGroup], block_size: int, max_num_seqs: int
) -> list[Window]:
    """Return one window for each distinct kind of group in which a token does not see all earlier tokens."""
    seeing_all = (AttentionKind.FULL, AttentionKind.CROSS)
    alike: dict[KVCacheGroup, list[int]] = {}
    for number, group in enumerate(groups):
        if group.kind not in seeing_all:
            alike.setdefault(group, []).append(number)
    return [Window(spec, numbers, block_size, max_num_seqs) for spec, numbers in alike.items()]
