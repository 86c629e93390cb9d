"""Record which waiting request did not fit into the free blocks, so that not every step tries it again."""

from __future__ import annotations

from ...kv_cache.block_pool import BlockPool
from ...state.request import Request


class BlockedRequest:
    """The request for which too few blocks were free, and the state of the pool at that time."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._request: Request | None = None
        self._num_changes = self._num_free = 0

    def record(self, request: Request) -> None:
        """Record that too few blocks are free for a waiting request."""
        self._request = request
        self._num_changes, self._num_free = self._pool.num_changes, self._pool.num_free

    def is_blocked(self, request: Request) -> bool:
        """Return whether the request did not fit, and no block was freed or cached since then."""
        return self._request is request and self._num_changes == self._pool.num_changes

    def is_probably_blocked(self, request: Request) -> bool:
        """Return whether the request did not fit, and no more blocks are free now than then."""
        return self._request is request and self._num_free >= self._pool.num_free
