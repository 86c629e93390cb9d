"""Count the unfinished requests of each LoRA adapter."""

from __future__ import annotations

from ....protocol.file_identity import LoraAdapter
from ....protocol.messages import SchedulerStats
from .lora_cache import LoraCache


class LoraRequests:
    """The number of unfinished requests per LoRA adapter. An adapter whose last request finishes is released."""

    def __init__(self, cache: LoraCache) -> None:
        self._cache = cache
        self._counts: dict[LoraAdapter, int] = {}
        self._has_ended_load = False

    def record_arrival(self, adapter: LoraAdapter) -> None:
        """Count a request that has arrived."""
        self._counts[adapter] = self._counts.get(adapter, 0) + 1

    def record_end(self, adapter: LoraAdapter) -> None:
        """Count a request that has finished."""
        self._counts[adapter] -= 1
        if not self._counts[adapter]:
            del self._counts[adapter]
            self._cache.release(adapter)

    def end_load(self, number: int, *, is_loaded: bool) -> LoraAdapter | None:
        """Record that all workers have answered a load. Return its adapter, or None for an unknown number."""
        self._has_ended_load = True
        return self._cache.end_load(number, is_loaded=is_loaded)

    def take_ended_loads(self) -> bool:
        """Return whether a load has ended since the last call of this method."""
        has_ended, self._has_ended_load = self._has_ended_load, False
        return has_ended

    def write_stats(self, stats: SchedulerStats, num_running: dict[LoraAdapter, int]) -> None:
        """Write the adapters of running and waiting requests; `num_running` has the running ones per adapter."""
        if not self._counts:
            return
        stats.running_loras = sorted({lora.name for lora in num_running})
        stats.waiting_loras = sorted(
            {lora.name for lora, count in self._counts.items() if count > num_running.get(lora, 0)}
        )
