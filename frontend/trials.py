"""Sequences that may have killed a core which sent no last message: they go to the next core one at a time.

After such a death it is not known which sequences the core was computing, and a request may kill it by merely arriving.
So a sequence that has seen two such deaths in a row without a token is kept back until all others of that core have got
further.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from ..protocol.heartbeat import BEAT_INTERVAL_S
from .request_group import Sequence

TURN_S: Final = 2 * BEAT_INTERVAL_S
"""So long after a core is ready the first frontend begins: by then a heartbeat has told the supervisor of the tokens of
other sequences. The other frontends follow at this distance, in another order each epoch, so that suspects of different
frontends rarely run together."""


class Trials:
    """The suspects of one frontend at one core. `send` sends a sequence there."""

    def __init__(self, send: Callable[[Sequence], None]) -> None:
        self._send = send
        self._suspects: list[Sequence] = []
        self._awaited: list[Sequence] = []
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, turn: int) -> None:
        """A core is ready, and has no sequences yet. `turn` is this frontend's place among all, from 0."""
        self.close()
        self._suspects.clear()
        self._awaited.clear()
        self._timer = asyncio.get_running_loop().call_later(TURN_S * (1 + turn), self._begin)

    def _begin(self) -> None:
        self._timer = None
        self.advance()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wait_for(self, other: Sequence) -> None:
        """This sequence was sent as well; suspects wait until it has got further."""
        self._awaited.append(other)

    def add(self, suspect: Sequence) -> None:
        """Suspects with the fewest deaths come first: they are the least likely to cause one."""
        self._suspects.append(suspect)
        self._suspects.sort(key=lambda sequence: sequence.num_silent_deaths)
        self.advance()

    def withdraw(self, sequence: Sequence) -> None:
        """This sequence goes to another core."""
        for waiting in (self._suspects, self._awaited):
            if sequence in waiting:
                waiting.remove(sequence)

    def advance(self) -> None:
        """Send the next suspect if it is time. To be called whenever sequences may have got further."""
        if self._timer is not None or not (self._suspects or self._awaited):
            return
        self._awaited = [each for each in self._awaited if not each.has_got_further]
        while self._suspects and not self._awaited:
            suspect = self._suspects.pop(0)
            if not suspect.finished:
                self._send(suspect)
                self._awaited.append(suspect)
