"""Awaitables that are run at once, and become tasks only if they have to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from typing import Any


def run_until_wait(awaitable: Awaitable[None]) -> asyncio.Task[None] | None:
    """Run `awaitable` in the caller's place. Returns None if it ended, else the task that runs its rest.

    Spares a task and a turn of the event loop where waiting is the exception.
    """
    steps = awaitable.__await__()
    try:
        waits_for = next(steps)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_run_on(_Begun(waits_for, steps)))


class _Begun:
    def __init__(self, waits_for: Any, steps: Generator[Any, Any, None]) -> None:
        self._waits_for = waits_for
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._waits_for
        except BaseException:
            self._steps.close()
            raise
        yield from self._steps


async def _run_on(begun: _Begun) -> None:
    await begun
