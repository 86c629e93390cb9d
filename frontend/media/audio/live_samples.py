"""The samples of a clip that is read while it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from ....protocol.arrays import Float32Array

_PIECE: Final = 16_000
"""The maximum number of samples whose features are computed at once."""


class ClipDropped(Exception):
    """Raised to the reader of a clip that was discarded before its end."""


class LiveSamples:
    """The samples of a clip that arrives. One reader iterates over the pieces that were fed."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[Float32Array | None] = asyncio.Queue()
        self._is_dropped = False

    def feed(self, samples: Float32Array) -> None:
        """Add samples."""
        for start in range(0, len(samples), _PIECE):
            self._pieces.put_nowait(samples[start : start + _PIECE])

    def end(self) -> None:
        """Record that no samples follow."""
        self._pieces.put_nowait(None)

    def drop(self) -> None:
        """End the clip, and make its reader discard it."""
        self._is_dropped = True
        self.end()

    async def __aiter__(self) -> AsyncIterator[Float32Array]:
        """Yield the pieces until the end. Raise ClipDropped if the clip was dropped."""
        while (piece := await self._pieces.get()) is not None and not self._is_dropped:
            yield piece
        if self._is_dropped:
            raise ClipDropped
