"""Collecting what happens to cached blocks."""

from __future__ import annotations

from typing import Final

from ..protocol.block_hash import HASH_BYTES
from ..protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from .outside import Outside

MEDIUM: Final = "GPU"
"""What subscribers call the workers' own tier, whatever the device."""


class KVEventLog(Outside):
    """Events since the last `take`, in order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KVCacheEvent] = []

    def stored(self, hashes: list[bytes], parent: bytes | None, token_ids: list[int]) -> None:
        """Consecutive blocks became findable."""
        self._events.append(
            BlockStored(hashes, parent, token_ids, self._block_size, None, MEDIUM, None)
        )

    def removed(self, digest: bytes) -> None:
        """A block is findable no more. Of several groups, subscribers follow the first (see `group_key`)."""
        if len(digest) != HASH_BYTES:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(digest)
        else:
            self._events.append(BlockRemoved([digest], MEDIUM))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events
