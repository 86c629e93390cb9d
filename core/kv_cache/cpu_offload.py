"""Keep blocks that were evicted from the workers' KV cache in CPU memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from ...protocol.arrays import int32_bytes
from .gradual_list import GradualList


class CPUOffload:
    """A cache of blocks 0 … num_blocks - 1 in CPU memory, keyed by content; the least recently used is replaced first.

    Copies are collected for the next step. Before anything else, that step executes the copies out of the workers' KV
    cache, then those into it. Until then, no CPU block that is part of a copy is overwritten.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_copied_out = self._num_copied_in = 0
        self._block_of: dict[bytes, int] = {}
        self._contents: GradualList[bytes | None] = GradualList([None] * num_blocks)
        """The content of each block, from which with `_used_at` a snapshot's `_block_of` is computed."""
        self._used_at = array("q", [0]) * num_blocks
        self._num_uses = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._copies_out: list[tuple[int, int]] = []
        self._copies_in: list[tuple[int, int]] = []
        self._busy: set[int] = set()

    @property
    def num_cached(self) -> int:
        """Number of blocks with content."""
        return len(self._block_of)

    @property
    def num_free(self) -> int:
        """Number of blocks without content."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the blocks with content, from 0 to 1."""
        return len(self._block_of) / self.num_blocks

    def find_block(self, key: bytes) -> int | None:
        """Return the CPU block with this content, or None."""
        return self._block_of.get(key)

    def store_block(self, key: bytes, device_block: int) -> None:
        """Copy a block of the workers' KV cache to CPU memory before it is overwritten.

        Does nothing if no CPU block can be evicted because all are being copied.
        """
        block = self._block_of.pop(key, None)
        if block is None:
            block = self._take_block()
            if block is None:
                return
            self._busy.add(block)
            self._copies_out.append((device_block, block))
            self._num_copied_out += 1
        self._add(key, block)

    def reserve_blocks(self, keys: Iterable[bytes]) -> None:
        """Protect blocks that are about to be loaded from being overwritten in this step."""
        for key in keys:
            block = self._block_of.pop(key)
            self._add(key, block)
            self._busy.add(block)

    def load_block(self, key: bytes, device_block: int) -> None:
        """Copy a reserved block back into the workers' KV cache."""
        self._copies_in.append((self._block_of[key], device_block))
        self._num_copied_in += 1

    def remove_blocks(self, keys: Iterable[bytes]) -> None:
        """Remove content that may be wrong."""
        for key in keys:
            block = self._block_of.pop(key, None)
            if block is not None:
                self._contents.replace_item(block, None)
                self._free.insert(0, block)

    def clear(self) -> None:
        """Remove all content."""
        self._block_of.clear()
        self._contents.replace_all([None] * self.num_blocks)
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._copies_out.clear()
        self._busy.clear()

    def take_counts(self) -> tuple[int, int]:
        """Return the numbers of blocks copied to and from CPU memory since the last call."""
        counts = self._num_copied_out, self._num_copied_in
        self._num_copied_out = self._num_copied_in = 0
        return counts

    def take_copies(self) -> tuple[bytes, bytes]:
        """Return the copies to and from CPU memory for the next step, as int32 pairs (source block, target block)."""
        if not self._busy:
            return b"", b""
        copies = int32_bytes(self._copies_out), int32_bytes(self._copies_in)
        self._copies_out.clear()
        self._copies_in.clear()
        self._busy.clear()
        return copies

    def rebuild(self) -> None:
        """Compute the field that is not part of snapshots."""
        keys = self._contents.items
        used = (block for block, key in enumerate(keys) if key is not None)
        order = sorted(used, key=self._used_at.__getitem__)
        self._block_of = {key: block for block in order if (key := keys[block]) is not None}

    def _add(self, key: bytes, block: int) -> None:
        """Record the content of a block, which is now the most recently used one."""
        self._block_of[key] = block
        if self._contents.items[block] != key:
            self._contents.replace_item(block, key)
        self._num_uses += 1
        self._used_at[block] = self._num_uses

    def _take_block(self) -> int | None:
        """Return a block to overwrite: a free one, or the least recently used one."""
        if self._free and self._free[-1] not in self._busy:
            return self._free.pop()
        for key, block in self._block_of.items():
            if block not in self._busy:
                del self._block_of[key]
                return block
        return None
