"""Run work that is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from .body import ClientDisconnected

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`.

    Raises:
        ClientDisconnected: The client closed the connection first; `work` is cancelled.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return await task
    finally:
        for each in (task, watch):
            each.cancel()
        # Work that fails while it is cancelled is of no interest to a client that has left.
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
