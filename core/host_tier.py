"""Blocks that were evicted from the workers' KV cache and are kept in host memory instead."""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.arrays import int32_bytes


class HostTier:
    """Host blocks 0 … num_blocks - 1 by the keys of their content, least recently used first.

    Copies are collected for the step in the making, which executes those out of the workers' cache, then those
    into it, before anything else. Until then no host block that is part of a copy is given other content.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_copied_out = self._num_copied_in = 0
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._copies_out: list[tuple[int, int]] = []
        self._copies_in: list[tuple[int, int]] = []
        self._busy: set[int] = set()

    @property
    def num_cached(self) -> int:
        return len(self._block_of)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks with content, 0 to 1."""
        return len(self._block_of) / self.num_blocks

    def find(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def store(self, key: bytes, device_block: int) -> None:
        """Keep the content of a block that is about to be overwritten, unless every host block is busy."""
        block = self._block_of.pop(key, None)
        if block is None:
            block = self._take()
            if block is None:
                return
            self._busy.add(block)
            self._copies_out.append((device_block, block))
            self._num_copied_out += 1
        self._block_of[key] = block

    def reserve(self, keys: Iterable[bytes]) -> None:
        """Keep blocks that are about to be loaded from being reused in this step."""
        for key in keys:
            block = self._block_of.pop(key)
            self._block_of[key] = block
            self._busy.add(block)

    def load(self, key: bytes, device_block: int) -> None:
        """Copy a reserved block back."""
        self._copies_in.append((self._block_of[key], device_block))
        self._num_copied_in += 1

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop content that is not to be trusted."""
        for key in keys:
            block = self._block_of.pop(key, None)
            if block is not None:
                self._free.insert(0, block)

    def clear(self) -> None:
        self._block_of.clear()
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._copies_out.clear()
        self._busy.clear()

    def take_counts(self) -> tuple[int, int]:
        """Blocks copied out and in since the last call."""
        counts = self._num_copied_out, self._num_copied_in
        self._num_copied_out = self._num_copied_in = 0
        return counts

    def take_copies(self) -> tuple[bytes, bytes]:
        """Int32 pairs (from, to) of the copies out and in that the next step begins with."""
        if not self._busy:
            return b"", b""
        copies = int32_bytes(self._copies_out), int32_bytes(self._copies_in)
        self._copies_out.clear()
        self._copies_in.clear()
        self._busy.clear()
        return copies

    def _take(self) -> int | None:
        """A block to fill: a free one, or that of the least recently used content."""
        if self._free and self._free[-1] not in self._busy:
            return self._free.pop()
        for key, block in self._block_of.items():
            if block not in self._busy:
                del self._block_of[key]
                return block
        return None
