"""What the frontends are told of a core so that they can choose between several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...protocol.arrays import uint64_bytes
from ...protocol.block_hash import block_keys
from ...protocol.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from ...protocol.messages import ReplicaLoadUpdate


class ClientUpdates:
    """Counts the requests of each client, and remembers the keys of the cached blocks."""

    def __init__(self) -> None:
        self._num_inflight: dict[int, int] = {}
        self._told_others: dict[int, int] = {}
        self._new_clients: set[int] = set()
        self._cached: set[int] = set()
        self._changes: dict[int, bool] = {}

    def open(self, client_index: int) -> None:
        """A client has greeted: it has no requests and knows nothing."""
        self._num_inflight[client_index] = 0
        self._new_clients.add(client_index)

    def close(self, client_index: int) -> None:
        del self._num_inflight[client_index]
        self._told_others.pop(client_index, None)
        self._new_clients.discard(client_index)

    def added(self, client_index: int, num_requests: int) -> None:
        self._num_inflight[client_index] += num_requests

    def finished(self, client_index: int, num_requests: int) -> None:
        self._num_inflight[client_index] -= num_requests

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        """Follow what has happened to cached blocks."""
        for event in events:
            if isinstance(event, BlockStored):
                self._note(block_keys(b"".join(event.block_hashes)), is_cached=True)
            elif isinstance(event, BlockRemoved):
                self._note(block_keys(b"".join(event.block_hashes)), is_cached=False)
            else:
                self._note(list(self._cached), is_cached=False)

    def _note(self, keys: list[int], *, is_cached: bool) -> None:
        if is_cached:
            self._cached.update(keys)
        else:
            self._cached.difference_update(keys)
        self._changes.update(dict.fromkeys(keys, is_cached))

    def take(self) -> Iterator[tuple[int, ReplicaLoadUpdate]]:
        """The clients that have something to hear, and what."""
        stored = removed = b""
        if self._changes:
            stored, removed = (
                uint64_bytes(
                    [key for key, is_cached in self._changes.items() if is_cached is wanted]
                )
                for wanted in (True, False)
            )
            self._changes.clear()
        total = sum(self._num_inflight.values())
        for client_index, num_inflight in self._num_inflight.items():
            num_others = total - num_inflight
            if client_index in self._new_clients:
                yield (
                    client_index,
                    ReplicaLoadUpdate(num_others, uint64_bytes(list(self._cached)), is_whole=True),
                )
            elif stored or removed or num_others != self._told_others[client_index]:
                yield client_index, ReplicaLoadUpdate(num_others, stored, removed)
            self._told_others[client_index] = num_others
        self._new_clients.clear()
