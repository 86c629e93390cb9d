"""The scheduler side of the KV connector to LMCache, which has no index and asks the workers instead."""

from __future__ import annotations

from collections.abc import Sequence

from ....protocol.config import KVTransferConfig
from ....protocol.kv_transfer.store import LMCACHE_CONNECTOR, BlockLookup, StoreReport
from ....protocol.messages import FinishReason
from ...state.request import Request
from ..connector import RequestEnd, register_connector
from .store_tier import StoreTier


class _Lookup:
    """A question about the blocks of a request: how many workers have not answered, and the keys that all have."""

    def __init__(self, keys: Sequence[bytes], num_workers: int) -> None:
        self.keys = list(keys)
        self.num_left = num_workers
        self.found = set(keys)


class LMCacheTier(StoreTier):
    """Asks all workers once for each request which of its blocks LMCache has. The request waits for the answers."""

    def __init__(self, num_workers: int = 1) -> None:
        super().__init__(num_workers)
        self._lookups: dict[int, _Lookup] = {}
        """For each request that is not finished, by its transfer id, the question about its blocks."""

    def find_blocks(self, request: Request, keys: Sequence[bytes]) -> bytes | None:
        """Return 1 for each key that LMCache has at all workers, else 0; None until they have answered."""
        if self._is_off or not self._capacity:
            return b""
        lookup = self._lookups.get(request.transfer_id)
        if lookup is None:
            lookup = self._lookups[request.transfer_id] = _Lookup(keys, self._num_workers)
            self._commands.lookups.append(BlockLookup(request.transfer_id, lookup.keys))
        if lookup.num_left:
            return None
        mask = bytes(map(lookup.found.__contains__, keys))
        return mask if 1 in mask else b""

    def request_finished(
        self, request: Request, block_ids: Sequence[int], reason: FinishReason
    ) -> RequestEnd:
        """Discard the answers about a request."""
        self._lookups.pop(request.transfer_id, None)
        return RequestEnd()

    def cache_cleared(self) -> None:
        """Delete everything that LMCache can delete, and find none of it for the requests that wait."""
        super().cache_cleared()
        for lookup in self._lookups.values():
            lookup.found.clear()

    def _is_stored(self, key: bytes) -> bool:
        # The workers look up each block before they store it.
        return False

    def _remove(self, keys: list[bytes]) -> None:
        self._commands.removed += keys
        for lookup in self._lookups.values():
            lookup.found.difference_update(keys)

    def _apply(self, rank: int, report: StoreReport) -> None:
        for answer in report.answers:
            lookup = self._lookups.get(answer.transfer_id)
            if lookup is not None:
                lookup.num_left -= 1
                lookup.found.difference_update(
                    key
                    for key, is_found in zip(lookup.keys, answer.mask, strict=True)
                    if not is_found
                )

    def _turn_off(self) -> None:
        super()._turn_off()
        self._lookups.clear()
        self._commands.lookups.clear()


def _create(config: KVTransferConfig) -> LMCacheTier:
    num_workers = config.kv_connector_extra_config.get("num_workers", 1)
    assert isinstance(num_workers, int)
    return LMCacheTier(num_workers)


register_connector(LMCACHE_CONNECTOR, _create)
