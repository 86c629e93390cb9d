"""Let batches take turns in starting requests, so that a large batch does not delay others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

ROOM_S: Final = 0.02
"""Seconds between checks whether there is room for a request."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A batch that waits for its turn. The result of `turn` is False if it gave up."""

    gives_up: Callable[[], bool]
    turn: asyncio.Future[bool]


class Turns:
    """A queue in which batches wait for free capacity.

    A batch joins the end of the queue for each request, so batches start requests alternately.

    Args:
        has_room: Returns whether one more request may start.
    """

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._waiting: deque[_Waiter] = deque()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, gives_up: Callable[[], bool]) -> bool:
        """Wait for the caller's turn and for free capacity. Return False if `gives_up` becomes true before that."""
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
                # The batch starts its request, which uses capacity, before the next batch has its turn.
                await asyncio.sleep(0)
            elif self._waiting:
                await asyncio.sleep(ROOM_S)
        self._task = None
