"""The router of a simulated fleet: the frontends' choice of replicas, with the load updates that cores send."""

from __future__ import annotations

from collections.abc import Iterable

from ...protocol.arrays import uint64_view
from ...protocol.block_hash import block_keys
from ...protocol.kv_events import KVCacheEvent
from ...protocol.messages import EngineCoreRequest
from ...protocol.routing.cached_prefixes import CachedPrefixes
from ...protocol.routing.choice import choose_replica
from ..reporting.client_updates import ClientUpdates


class Router:
    """Chooses a replica for each request, as one frontend of the whole fleet would.

    Args:
        num_replicas: The number of replicas.
        max_num_seqs: Sequences that a replica runs at the same time.
    """

    def __init__(self, num_replicas: int, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._loads = [0] * num_replicas
        self._prefixes = [CachedPrefixes() for _ in range(num_replicas)]
        self._updates = [ClientUpdates() for _ in range(num_replicas)]
        for update in self._updates:
            update.add_client(0)
        self._holders: dict[int, set[int]] = {}
        """The replicas that may have each block, so that the others are not searched."""
        self._sent: dict[int, tuple[int, list[int]]] = {}

    def route(self, request: EngineCoreRequest) -> int:
        """Return the replica for a request, and count the request there."""
        keys = block_keys(request.block_hashes)
        home = keys[0] if keys else 0
        num_cached = {}
        for index in self._holders.get(home, ()):
            if count := self._prefixes[index].count_blocks(keys):
                num_cached[index] = count
        index = choose_replica(self._loads, num_cached, len(keys), home, self._max_num_seqs)
        self._loads[index] += 1
        self._prefixes[index].add_expected(keys)
        self._hold(index, keys)
        self._sent[request.request_index] = index, keys
        return index

    def find_replica(self, request_index: int) -> int:
        """Return the replica of an unfinished request."""
        return self._sent[request_index][0]

    def remove_requests(self, request_indices: Iterable[int]) -> None:
        """Remove ended requests."""
        for request_index in request_indices:
            index, keys = self._sent.pop(request_index)
            self._loads[index] -= 1
            self._prefixes[index].remove_expected(keys)

    def apply_events(self, index: int, events: list[KVCacheEvent]) -> None:
        """Send the load update of a replica to the frontend."""
        updates = self._updates[index]
        updates.apply_events(events)
        for _, update in updates.take_updates():
            self._prefixes[index].apply_update(update)
            self._hold(index, uint64_view(update.stored).tolist())

    def count_missing(self, request: EngineCoreRequest) -> int:
        """Return how many full blocks of a routed prompt are not cached at its replica."""
        index, keys = self._sent[request.request_index]
        return len(keys) - self._prefixes[index].count_stored(keys)

    def _hold(self, index: int, keys: Iterable[int]) -> None:
        for key in keys:
            self._holders.setdefault(key, set()).add(index)

    @property
    def num_unfinished(self) -> int:
        """The number of requests that have not ended."""
        return len(self._sent)
