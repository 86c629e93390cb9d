"""Track which LoRA adapters the workers have loaded, which ones they must load next, and which ones requests need."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from ....protocol.file_identity import LoraAdapter
from ....protocol.messages import SchedulerStats
from ....protocol.worker_messages import LoraLoad


class LoraCache:
    """The LoRA adapters that the workers hold, each under a number below `capacity`.

    An adapter that no running request uses stays until its number is needed; the least recently used one is replaced
    first. An adapter that was loaded for a waiting request is pending until a request that uses it starts, or until its
    last request finishes. A pending adapter is not replaced and counts toward `max_loras`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity))[::-1]
        self._loaded: OrderedDict[LoraAdapter, int] = OrderedDict()
        """The number of each loaded adapter, least recently used first."""
        self._loading: dict[LoraAdapter, int] = {}
        self._pending: dict[LoraAdapter, None] = {}
        self._unsent: list[LoraLoad] = []
        self._num_requests: dict[LoraAdapter, int] = {}
        """Number of unfinished requests per adapter."""
        self._has_ended_load = False

    @property
    def has_unsent(self) -> bool:
        """True if loads have begun that no step message has reported to the workers."""
        return bool(self._unsent)

    @property
    def num_held(self) -> int:
        """Number of adapters that are loaded or being loaded, plus the unused numbers."""
        return len(self._loaded) + len(self._loading) + len(self._free)

    @property
    def num_pending(self) -> int:
        """Number of adapters that were loaded for requests that have not started."""
        return len(self._pending)

    def is_pending(self, adapter: LoraAdapter) -> bool:
        """Return whether an adapter was loaded for requests that have not started."""
        return adapter in self._pending

    def is_loaded(self, adapter: LoraAdapter) -> bool:
        """Return whether every worker has loaded an adapter."""
        return adapter in self._loaded

    def use(self, adapter: LoraAdapter) -> int:
        """Return the number of a loaded adapter that a request starts to use."""
        self._pending.pop(adapter, None)
        self._loaded.move_to_end(adapter)
        return self._loaded[adapter]

    def begin_load(self, adapter: LoraAdapter, in_use: Collection[LoraAdapter]) -> None:
        """Start to load an adapter for a request, unless it is loaded or being loaded.

        If no number is free, the adapter replaces the least recently used one that is neither pending nor `in_use`. If
        all are, nothing happens.
        """
        if adapter in self._loading or adapter in self._loaded:
            self._pending[adapter] = None
            return
        if not self._free:
            kept = (in_use, self._pending)
            unused = next((a for a in self._loaded if not any(a in each for each in kept)), None)
            if unused is None:
                return
            self._free.append(self._loaded.pop(unused))
        self._pending[adapter] = None
        number = self._loading[adapter] = self._free.pop()
        self._unsent.append(LoraLoad(number, adapter))

    def take_loads(self) -> list[LoraLoad]:
        """Return the loads that were begun since the last call."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def end_load(self, number: int, *, is_loaded: bool) -> LoraAdapter | None:
        """Record that all workers have answered a load. Return its adapter, or None for an unknown number."""
        self._has_ended_load = True
        adapter = next((each for each, n in self._loading.items() if n == number), None)
        if adapter is None:
            return None
        del self._loading[adapter]
        if is_loaded:
            self._loaded[adapter] = number
        else:
            self._free.append(number)
            self._pending.pop(adapter, None)
        return adapter

    def release_all(self) -> None:
        """Allow every pending adapter to be replaced."""
        self._pending.clear()

    def take_ended_loads(self) -> bool:
        """Return whether a load has ended since the last call of this method."""
        has_ended, self._has_ended_load = self._has_ended_load, False
        return has_ended

    def record_arrival(self, adapter: LoraAdapter) -> None:
        """Count a request that has arrived."""
        self._num_requests[adapter] = self._num_requests.get(adapter, 0) + 1

    def record_end(self, adapter: LoraAdapter) -> None:
        """Count a request that has finished."""
        self._num_requests[adapter] -= 1
        if not self._num_requests[adapter]:
            del self._num_requests[adapter]
            self._pending.pop(adapter, None)

    def write_stats(self, stats: SchedulerStats, num_running: dict[LoraAdapter, int]) -> None:
        """Write the adapters of running and waiting requests; `num_running` has the running ones per adapter."""
        if self._num_requests:
            counts = self._num_requests.items()
            waiting = {each.name for each, count in counts if count > num_running.get(each, 0)}
            stats.running_loras = sorted({lora.name for lora in num_running})
            stats.waiting_loras = sorted(waiting)
