"""The scheduler side of the KV cache on disk, which has an index of the blocks that all workers can read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ....protocol.config import KVTransferConfig
from ....protocol.kv_transfer.store import DISK_CONNECTOR, StoreReport
from ...state.request import Request
from ..connector import register_connector
from .store_tier import StoreTier, count_down


class DiskTier(StoreTier):
    """Finds the blocks that all workers have on their disks."""

    def __init__(self, num_workers: int = 1) -> None:
        super().__init__(num_workers)
        self._everyone = (1 << num_workers) - 1
        self._having: dict[bytes, int] = {}
        """For each block key, the workers that have it on disk, as a bit mask of ranks."""
        self._stored: set[bytes] = set()
        """The keys of the blocks that all workers have on disk."""
        self._unwanted: Counter[bytes] = Counter()
        """For each block key, how many workers have not yet confirmed the command to delete it."""

    def find_blocks(self, request: Request, keys: Sequence[bytes]) -> bytes:
        """Return 1 for each key that all workers have on disk, else 0; b"" if there is none or a disk hangs."""
        stored = self._stored
        if not (stored and self._capacity) or self._hanging:
            return b""
        mask = bytes(map(stored.__contains__, keys))
        return mask if 1 in mask else b""

    def cache_cleared(self) -> None:
        """Delete everything from the disk."""
        super().cache_cleared()
        self._having.clear()
        self._stored.clear()

    def _is_stored(self, key: bytes) -> bool:
        return key in self._stored

    def _remove(self, keys: list[bytes]) -> None:
        for key in keys:
            self._stored.discard(key)
            if self._having.pop(key, 0) or key in self._storing:
                self._commands.removed.append(key)
                self._unwanted[key] += self._num_workers

    def _apply(self, rank: int, report: StoreReport) -> None:
        for key in report.deleted:
            count_down(self._unwanted, key)
        self._add_stored(1 << rank, report.stored)
        for key in report.removed:
            self._stored.discard(key)
            self._having[key] = self._having.get(key, 0) & ~(1 << rank)
            if not self._having[key]:
                del self._having[key]

    def _add_stored(self, worker: int, keys: list[bytes]) -> None:
        if self._is_off:
            return
        having, unwanted = self._having, self._unwanted
        for key in keys:
            workers = having[key] = having.get(key, 0) | worker
            if workers == self._everyone and key not in unwanted:
                self._stored.add(key)

    def _turn_off(self) -> None:
        super()._turn_off()
        self._stored.clear()
        self._having.clear()
        self._unwanted.clear()


def _create(config: KVTransferConfig) -> DiskTier:
    num_workers = config.kv_connector_extra_config.get("num_workers", 1)
    assert isinstance(num_workers, int)
    return DiskTier(num_workers)


register_connector(DISK_CONNECTOR, _create)
