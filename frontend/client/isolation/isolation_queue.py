"""The isolation queue: sequences that may crash the core (suspects) are sent to it one at a time.

When a core exits without a final message, it is unknown which sequences it was computing, and a request may crash the
next core as soon as it arrives. So a sequence that was at two such cores in a row, and got no token from them, is held
back until all other sequences of the core have made progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from ....protocol.heartbeat import BEAT_INTERVAL_S
from ..request_group import Sequence

TURN_S: Final = 2 * BEAT_INTERVAL_S
"""Seconds from a core's readiness to the first frontend's suspects, and from one frontend's suspects to the next's.

After this time a heartbeat has reported the tokens of other sequences to the supervisor. The order of the frontends
differs in each epoch, so that suspects of different frontends rarely run together.
"""


class IsolationQueue:
    """The suspected sequences of one frontend at one core. `send` sends a sequence to that core."""

    def __init__(self, send: Callable[[Sequence], None]) -> None:
        self._send = send
        self._suspects: list[Sequence] = []
        self._awaited: list[Sequence] = []
        self._timer: asyncio.TimerHandle | None = None

    def reset(self, turn: int) -> None:
        """Reset for a core that is ready and has no sequences yet.

        `turn` is this frontend's position among all, from 0.
        """
        self.close()
        self._suspects.clear()
        self._awaited.clear()
        self._timer = asyncio.get_running_loop().call_later(TURN_S * (1 + turn), self._begin)

    def _begin(self) -> None:
        self._timer = None
        self.advance()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def await_progress(self, other: Sequence) -> None:
        """Hold back suspects until another sequence, which was sent to the core, has made progress."""
        self._awaited.append(other)

    def add_suspect(self, suspect: Sequence) -> None:
        """Add a suspect. Suspects with the fewest crashes run first, because they are the least likely cause."""
        self._suspects.append(suspect)
        self._suspects.sort(key=lambda sequence: sequence.num_silent_crashes)
        self.advance()

    def remove_sequence(self, sequence: Sequence) -> None:
        """Remove a sequence that moves to another core."""
        for waiting in (self._suspects, self._awaited):
            if sequence in waiting:
                waiting.remove(sequence)

    def advance(self) -> None:
        """Send the next suspect if possible. Must be called whenever sequences may have made progress."""
        if self._timer is not None or not (self._suspects or self._awaited):
            return
        self._awaited = [each for each in self._awaited if not each.has_progressed]
        while self._suspects and not self._awaited:
            suspect = self._suspects.pop(0)
            if not suspect.finished:
                self._send(suspect)
                self._awaited.append(suspect)
