"""Collect the KV-cache events that are published to subscribers (`--kv-events-config`)."""

from __future__ import annotations

from typing import Final

from ...protocol.block_hash import HASH_BYTES
from ...protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from ..state.external_dependency import ExternalDependency

MEDIUM: Final = "GPU"
"""The value of `medium` in all events. Subscribers expect it on every kind of device."""


class KVEventLog(ExternalDependency):
    """The events since the last `take_events`, in order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KVCacheEvent] = []

    def record_stored(
        self, hashes: list[bytes], parent: bytes | None, token_ids: list[int]
    ) -> None:
        """Record that consecutive blocks became findable after the block `parent`."""
        self._events.append(
            BlockStored(hashes, parent, token_ids, self._block_size, None, MEDIUM, None)
        )

    def record_removed(self, digest: bytes) -> None:
        """Record that a block is no longer findable. Only group 0 is reported (see `group_key`)."""
        if len(digest) != HASH_BYTES:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(digest)
        else:
            self._events.append(BlockRemoved([digest], MEDIUM))

    def record_cleared(self) -> None:
        """Record that the whole cache was reset."""
        self._events.append(AllBlocksCleared())

    def take_events(self) -> list[KVCacheEvent]:
        """Return and remove the collected events."""
        events, self._events = self._events, []
        return events
