"""Takes requests from the batches in turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

ROOM_S: Final = 0.02
"""Seconds between looks whether there is room for a request."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A batch that waits. Its `turn` is False if it gave up."""

    gives_up: Callable[[], bool]
    turn: asyncio.Future[bool]


class Turns:
    """Batches wait here for room. One that waits again comes after all others, so requests start in turns.

    Args:
        has_room: Returns whether one more request may start.
    """

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._waiting: deque[_Waiter] = deque()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, gives_up: Callable[[], bool]) -> bool:
        """Wait for the turn of the caller and for room. Return False if the caller gives up meanwhile."""
        waiter = _Waiter(gives_up, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        if self._task is None:
            self._task = asyncio.create_task(self._give_turns())
        return await waiter.turn

    async def _give_turns(self) -> None:
        while self._waiting:
            for waiter in list(self._waiting):
                if waiter.turn.done():  # Its batch was stopped.
                    self._waiting.remove(waiter)
                elif waiter.gives_up():
                    self._waiting.remove(waiter)
                    waiter.turn.set_result(False)
            if self._waiting and self._has_room():
                self._waiting.popleft().turn.set_result(True)
                # The batch starts its request, which takes room, and waits again behind the others.
                await asyncio.sleep(0)
            elif self._waiting:
                await asyncio.sleep(ROOM_S)
        self._task = None
