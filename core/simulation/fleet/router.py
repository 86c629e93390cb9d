"""The router of a simulated fleet: the frontends' choice of replicas, with the load updates that cores send."""

from __future__ import annotations

from collections.abc import Iterable

from ....protocol.messages import ReplicaLoadUpdate
from ....protocol.routing.cached_prefixes import CachedPrefixes
from ....protocol.routing.choice import choose_replica


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
        self._holders: dict[int, set[int]] = {}
        """The replicas that got a prompt with this first block, so that the others are not searched."""
        self._sent: dict[int, tuple[int, list[int]]] = {}

    def route(self, request_index: int, keys: list[int]) -> int:
        """Return the replica for a request whose full blocks have these keys, and count the request there."""
        home = keys[0] if keys else 0
        num_cached = {}
        for index in self._holders.get(home, ()):
            if count := self._prefixes[index].count_blocks(keys):
                num_cached[index] = count
        index = choose_replica(self._loads, num_cached, len(keys), home, self._max_num_seqs)
        self._loads[index] += 1
        self._prefixes[index].add_expected(keys)
        if keys:
            self._holders.setdefault(home, set()).add(index)
        self._sent[request_index] = index, keys
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

    def apply_update(self, index: int, update: ReplicaLoadUpdate) -> None:
        """Apply the load update of a replica."""
        self._prefixes[index].apply_update(update)

    def count_missing(self, request_index: int) -> int:
        """Return how many full blocks of a routed prompt are not cached at its replica."""
        index, keys = self._sent[request_index]
        return len(keys) - self._prefixes[index].count_stored(keys)
