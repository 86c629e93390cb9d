"""How far the windows of running requests have moved on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..protocol.arrays import Int64Array
from ..protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from .slots import SlotArray


class Window:
    """KV-cache groups that see the same part of a sequence. `first_held` is the first block each slot keeps."""

    def __init__(
        self, spec: KVCacheGroup, groups: list[int], block_size: int, max_num_seqs: int
    ) -> None:
        self.groups = groups
        self.first_held: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._spec = spec
        self._block_size = block_size

    def advance(self, slots: SlotArray, num_computed: Int64Array) -> Iterator[tuple[int, int, int]]:
        """Move on to the next token of each slot; yields (slot, start, end) for blocks that left its window."""
        first = self._spec.first_visible(num_computed) // self._block_size
        held = self.first_held[slots]
        rows = (first > held).nonzero()[0]
        self.first_held[slots[rows]] = first[rows]
        yield from zip(slots[rows].tolist(), held[rows].tolist(), first[rows].tolist(), strict=True)


def windows_of(groups: Sequence[KVCacheGroup], block_size: int, max_num_seqs: int) -> list[Window]:
    """One window for all groups that are alike; none for those that see everything."""
    seeing_all = (AttentionKind.FULL, AttentionKind.CROSS)
    alike: dict[KVCacheGroup, list[int]] = {}
    for number, group in enumerate(groups):
        if group.kind not in seeing_all:
            alike.setdefault(group, []).append(number)
    return [Window(spec, numbers, block_size, max_num_seqs) for spec, numbers in alike.items()]
