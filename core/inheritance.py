"""What requests had computed when their core died, until they come again.

The workers outlive their core, and so does the KV cache: a request that is sent to the next core again goes on with
the blocks that it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from ..protocol.arrays import int32_view
from ..protocol.kv_cache_groups import AttentionKind
from ..protocol.messages import HeldRequest
from .block_pool import NULL_BLOCK
from .kv_cache_manager import KVCacheManager
from .request import Request, RequestKey
from .reservations import Reservations


class _Estate(NamedTuple):
    """Blocks of `num_tokens` tokens, reserved under a number that is no request's."""

    number: int
    arrival_time: float
    num_tokens: int


class Inheritance:
    """Holds the blocks of the requests that were in the workers' slots, until their clients have sent them again."""

    def __init__(self, manager: KVCacheManager, reservations: Reservations) -> None:
        self._manager = manager
        self._reservations = reservations
        self._estates: dict[RequestKey, _Estate] = {}

    def begin(self, held: Sequence[HeldRequest]) -> None:
        """Hold what the workers have, before anything else is held.

        A state stands for the last computed token only, which may be one that the client has not got; and cross
        attention has blocks of its own size. Models with either compute again.
        """
        manager = self._manager
        without_parts = {AttentionKind.STATE_SPACE, AttentionKind.CROSS}
        if not without_parts.isdisjoint(group.kind for group in manager.groups):
            return
        for number, request in enumerate(held, 1):
            tables = tuple(int32_view(block_ids).tolist() for block_ids in request.block_ids)
            manager.reserved[-number] = tables
            self._estates[request.request_id] = _Estate(
                -number, request.arrival_time, request.num_computed_tokens
            )
        tables_of_all = chain.from_iterable(manager.reserved.values())
        manager.pool.adopt(filter(None, chain.from_iterable(tables_of_all)))

    def claim(self, request: Request, was_index: int) -> None:
        """Let a request that has just come go on with what it had as `was_index`, if that is there."""
        key = request.client_index, was_index
        estate = self._estates.get(key)
        if estate is None or estate.arrival_time != request.arrival_time:
            return
        if request.scores_prompt:
            return
        del self._estates[key]
        reserved = self._manager.reserved
        reserved[request.transfer_id] = reserved.pop(estate.number)
        self._reservations.add(request, self._num_usable(request, estate))

    def end(self, client_index: int) -> None:
        """Give up what no request of a client has claimed."""
        for key in [key for key in self._estates if key[0] == client_index]:
            self._manager.release_reserved(self._estates.pop(key).number)

    def _num_usable(self, request: Request, estate: _Estate) -> int:
        """How many computed tokens the request can keep: it must see them, and may write to their last block."""
        manager = self._manager
        tables = manager.reserved[request.transfer_id]
        num_tokens = min(estate.num_tokens, request.num_tokens - 1)
        num_whole, num_more = divmod(num_tokens, manager.block_size)
        if num_more and any(manager.pool.ref_counts[table[num_whole]] > 1 for table in tables):
            num_tokens -= num_more
        for group, table in zip(manager.groups, tables, strict=True):
            first = group.first_visible(num_tokens) // manager.block_size
            if NULL_BLOCK in table[first : -(-num_tokens // manager.block_size)]:
                return 0
        return num_tokens
