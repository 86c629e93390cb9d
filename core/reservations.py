"""Waiting requests that have computed tokens already, and the blocks that are kept for them."""

from __future__ import annotations

from .kv_cache_manager import KVCacheManager
from .request import Request


class Reservations:
    """The manager reserves the blocks of each until it runs, ends, or another request needs the room."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._requests: dict[int, Request] = {}

    def add(self, request: Request, num_tokens: int) -> None:
        """A waiting request goes on with the reserved blocks of its first `num_tokens` tokens."""
        num_tokens = min(num_tokens, request.num_tokens)
        self._manager.trim_reserved(request, num_tokens)
        if num_tokens:
            request.num_reserved_tokens = num_tokens
            self._requests[request.transfer_id] = request

    def end(self, request: Request) -> None:
        """A request needs its reservation no more, if it has one."""
        if self._requests.pop(request.transfer_id, None) is not None:
            self._give_back(request)

    def take_back(self, but: Request | None = None) -> bool:
        """Free the blocks that the latest request only waits with. False when there is none."""
        request = max(
            (request for request in self._requests.values() if request is not but),
            key=lambda request: request.arrival,
            default=None,
        )
        if request is None:
            return False
        del self._requests[request.transfer_id]
        self._give_back(request)
        request.computes_locally = True
        return True

    def _give_back(self, request: Request) -> None:
        request.num_reserved_tokens = 0
        self._manager.release_reserved(request.transfer_id)
