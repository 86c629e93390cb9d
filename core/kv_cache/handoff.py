"""Hand the KV cache of a crashed core over to the next core.

The workers and their KV cache survive a crash of the core. A request that its client resubmits then continues with the
blocks that it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from ...protocol.arrays import int32_view
from ...protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from ...protocol.worker_messages import HeldRequest
from ..state.request import Request, RequestKey
from .block_pool import NULL_BLOCK
from .manager import KVCacheManager
from .reservations import Reservations


class _HeldBlocks(NamedTuple):
    """The blocks of `num_tokens` tokens of a request of the previous core, reserved under the negative `number`.

    Transfer ids are never negative, so the numbers cannot collide.
    """

    number: int
    arrival_time: float
    num_tokens: int


class KVHandoff:
    """Holds the blocks found in the workers' slots until clients have resubmitted their requests."""

    def __init__(self, manager: KVCacheManager, reservations: Reservations) -> None:
        self._manager = manager
        self._reservations = reservations
        self._held_blocks: dict[RequestKey, _HeldBlocks] = {}

    def adopt_blocks(self, held: Sequence[HeldRequest]) -> None:
        """Hold the blocks that the workers report. This must be called before any block is allocated."""
        manager = self._manager
        for number, request in enumerate(held, 1):
            tables = tuple(
                _useful_blocks(group, int32_view(block_ids).tolist())
                for group, block_ids in zip(manager.groups, request.block_ids, strict=True)
            )
            manager.reserved[-number] = tables
            self._held_blocks[request.request_id] = _HeldBlocks(
                -number, request.arrival_time, request.num_computed_tokens
            )
        tables_of_all = chain.from_iterable(manager.reserved.values())
        manager.pool.adopt_blocks(filter(None, chain.from_iterable(tables_of_all)))

    def claim_blocks(self, request: Request, was_index: int) -> None:
        """Let a resubmitted request continue with the blocks that it had under index `was_index`, if they are held."""
        key = request.client_index, was_index
        held_blocks = self._held_blocks.get(key)
        if held_blocks is None or held_blocks.arrival_time != request.arrival_time:
            return
        if request.computes_whole_prompt:
            return
        del self._held_blocks[key]
        reserved = self._manager.reserved
        reserved[request.transfer_id] = reserved.pop(held_blocks.number)
        self._reservations.add_reservation(request, self._num_usable(request, held_blocks))

    def release_unclaimed(self, client_index: int) -> None:
        """Release the blocks that no resubmitted request of a client has claimed."""
        for key in [key for key in self._held_blocks if key[0] == client_index]:
            self._manager.release_reserved(self._held_blocks.pop(key).number)

    def _num_usable(self, request: Request, held_blocks: _HeldBlocks) -> int:
        """Return how many computed tokens the request can keep.

        Every block that later tokens attend to must be present, and the last block must not be shared if it will be
        written to.
        """
        manager = self._manager
        tables = manager.reserved[request.transfer_id]
        num_tokens = min(held_blocks.num_tokens, request.num_tokens - 1)
        num_tokens -= num_tokens % manager.token_unit
        num_whole, num_more = divmod(num_tokens, manager.block_size)
        growing = [
            (group, table)
            for group, table in zip(manager.groups, tables, strict=True)
            if group.kind is not AttentionKind.CROSS
        ]
        if num_more and any(manager.pool.ref_counts[table[num_whole]] > 1 for _, table in growing):
            num_tokens -= num_more
        for group, table in growing:
            first = group.first_visible(num_tokens) // manager.block_size
            if NULL_BLOCK in table[first : -(-num_tokens // manager.block_size)]:
                return 0
            if group.kind is AttentionKind.STATE_SPACE:
                # The state is that of the last computed token, or of an earlier token in the same segment.
                segment = max(group.size, 1)
                if num_tokens // segment != held_blocks.num_tokens // segment:
                    return 0
        return num_tokens


def _useful_blocks(group: KVCacheGroup, table: list[int]) -> list[int]:
    """Return a table without the blocks that no later token reads.

    A recurrent layer needs only its last state. Cross attention needs no blocks, because a request's encoder output is
    stored again when it gets a slot.
    """
    if group.kind is AttentionKind.CROSS:
        return []
    if group.kind is not AttentionKind.STATE_SPACE or not table:
        return table
    return [NULL_BLOCK] * (len(table) - 1) + table[-1:]
