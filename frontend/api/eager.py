"""Coroutines that are run at once, and become tasks only if they have to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


def run_until_wait(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run a coroutine in the caller's place. Returns None if it ended, else the task that runs its rest.

    Spares a task and a turn of the event loop where waiting is the exception.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_run_on(_Begun(coroutine, waits_for)))


class _Begun:
    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._waits_for
        except BaseException:
            self._coroutine.close()
            raise
        yield from self._coroutine.__await__()


async def _run_on(begun: _Begun) -> None:
    await begun
