"""Track the computed blocks that are kept for waiting requests."""

from __future__ import annotations

from ..state.request import Request
from .manager import KVCacheManager


class Reservations:
    """Keeps the blocks of waiting requests until each runs or finishes, or another request needs the space."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._requests: dict[int, Request] = {}

    def add_reservation(self, request: Request, num_tokens: int) -> None:
        """Keep the reserved blocks of the request's first `num_tokens` tokens."""
        num_tokens = min(num_tokens, request.num_tokens)
        self._manager.trim_reserved(request, num_tokens)
        if num_tokens:
            request.num_reserved_tokens = num_tokens
            request.is_untouched = False
            self._requests[request.transfer_id] = request

    def end_reservation(self, request: Request) -> None:
        """Release the reserved blocks of a request, if it has any."""
        if self._requests.pop(request.transfer_id, None) is not None:
            self._give_back(request)

    def cut_back(self, invalid_blocks: set[int]) -> None:
        """Release the reserved blocks of each request that has an invalid one, so that it is computed from there."""
        manager = self._manager
        for request in list(self._requests.values()):
            blocks = manager.reserved[request.transfer_id][0]
            num_valid = next((i for i, block in enumerate(blocks) if block in invalid_blocks), None)
            if num_valid is not None:
                manager.invalidate_blocks(request, num_valid)
                request.has_untrusted_blocks = False
                self.end_reservation(request)
                request.computes_locally = True

    def reclaim_latest(self, but: Request | None = None) -> bool:
        """Free the blocks reserved for the last request to arrive, except `but`. Return False if there is none."""
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
