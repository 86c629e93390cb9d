"""Collect the load updates by which frontends choose between several replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...protocol.arrays import uint64_bytes
from ...protocol.block_hash import adapter_key, block_keys
from ...protocol.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from ...protocol.messages import ReplicaLoadUpdate
from ...protocol.worker_messages import LoraLoad


class ClientUpdates:
    """The requests per client, the keys of cached blocks and loaded LoRA adapters, and the changes not yet sent."""

    def __init__(self) -> None:
        self._num_inflight: dict[int, int] = {}
        self._reported_others: dict[int, int] = {}
        self._new_clients: set[int] = set()
        self._cached: set[int] = set()
        self._changes: dict[int, bool] = {}
        self._adapters: dict[int, int] = {}
        """The keys of adapters that are loaded or being loaded, by adapter number."""

    def add_client(self, client_index: int) -> None:
        """Add a client without requests. Its first update contains all keys."""
        self._num_inflight[client_index] = 0
        self._new_clients.add(client_index)

    def remove_client(self, client_index: int) -> None:
        """Remove a client and its requests."""
        del self._num_inflight[client_index]
        self._reported_others.pop(client_index, None)
        self._new_clients.discard(client_index)

    def add_requests(self, client_index: int, num_requests: int) -> None:
        """Add new requests to the number of a client's unfinished requests."""
        self._num_inflight[client_index] += num_requests

    def remove_requests(self, client_index: int, num_requests: int) -> None:
        """Subtract requests that ended from the number of a client's unfinished requests."""
        self._num_inflight[client_index] -= num_requests

    def apply_events(self, events: Iterable[KVCacheEvent]) -> None:
        """Apply KV-cache events to the set of keys."""
        for event in events:
            if isinstance(event, BlockStored):
                self._record_keys(block_keys(b"".join(event.block_hashes)), is_cached=True)
            elif isinstance(event, BlockRemoved):
                self._record_keys(block_keys(b"".join(event.block_hashes)), is_cached=False)
            else:
                self._record_keys(list(self._cached - {*self._adapters.values()}), is_cached=False)

    def begin_loads(self, loads: Iterable[LoraLoad]) -> None:
        """Record that the workers load adapters, each replacing the one with the same number."""
        for load in loads:
            self.drop_adapter(load.number)
            key = self._adapters[load.number] = adapter_key(load.adapter.version)
            self._record_keys([key], is_cached=True)

    def drop_adapter(self, number: int) -> None:
        """Record that the workers have no adapter under this number anymore."""
        key = self._adapters.pop(number, None)
        if key is not None and key not in self._adapters.values():
            self._record_keys([key], is_cached=False)

    def _record_keys(self, keys: list[int], *, is_cached: bool) -> None:
        if is_cached:
            self._cached.update(keys)
        else:
            self._cached.difference_update(keys)
        self._changes.update(dict.fromkeys(keys, is_cached))

    def take_updates(self) -> Iterator[tuple[int, ReplicaLoadUpdate]]:
        """Return an update for each client for which something has changed since the last call."""
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
            elif stored or removed or num_others != self._reported_others[client_index]:
                yield client_index, ReplicaLoadUpdate(num_others, stored, removed)
            self._reported_others[client_index] = num_others
        self._new_clients.clear()
