"""The blocks that a worker offers to the workers of other replicas."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .block_memory import BlockMemory, Fence


class OfferedBlocks:
    """Complete blocks by their content keys. One thread reads them while another one changes the offer."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._mutex = threading.Lock()
        self._blocks: dict[bytes, tuple[int, Fence]] = {}
        self._buffer_1B = None if memory.is_on_host else memory.host_buffer(1)

    def clear(self) -> None:
        """Withdraw all blocks. When this method returns, none of them is being read."""
        with self._mutex:
            self._blocks.clear()

    def withdraw(self, keys: Sequence[bytes]) -> None:
        """Withdraw blocks. When this method returns, none of them is being read, so they may be overwritten."""
        with self._mutex:
            for key in keys:
                self._blocks.pop(key, None)

    def offer(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Offer blocks that are complete once the device has done the work queued so far."""
        fence = self._memory.fence()
        with self._mutex:
            self._blocks.update(zip(keys, ((block, fence) for block in blocks), strict=True))

    def read(self, key: bytes) -> bytes | None:
        """Return a copy of a block, or None if it is not offered."""
        with self._mutex:
            found = self._blocks.get(key)
            if found is None:
                return None
            block, fence = found
            if self._buffer_1B is None:
                return b"".join(self._memory.views(block))
            self._memory.copy_out(block, self._buffer_1B, fence)
            return self._buffer_1B.tobytes()
