"""Answers of models that write who speaks when: `[0.00][S01]Good morning.[1.52][1.60][S02]Hello.[2.04]`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Final

from .segments import Turn, separator

_START: Final = re.compile(r"\s*\[([\d.:]{1,12})\]\s*\[S(\d{1,4})\]")
_END: Final = re.compile(r"\[([\d.:]{1,12})\]")

_MAX_START: Final = 32
"""Maximum characters of what begins a turn, and of the blanks before it."""

_MAX_END: Final = 14
"""Maximum characters of the time that ends a turn."""


def join_turns(turns: Iterable[Turn]) -> str:
    """Return the words of all turns."""
    text = ""
    for turn in turns:
        text += separator(text, turn.text) + turn.text
    return text


class TurnReader:
    """Reads turns from an answer that arrives in pieces. What is no turn is read as the words of an unknown speaker.

    Attributes:
        turns: The turns so far. The last one may still be open; its end is its start then.
        text: The words of all turns.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.text = ""
        self._rest = ""
        self._is_open = False

    def feed(self, text: str, *, is_end: bool = False) -> str:
        """Return what a piece of the answer adds to the text. The last piece has `is_end`."""
        self._rest += text
        num_before = len(self.text)
        while self._rest and (self._read_words(is_end) if self._is_open else self._begin(is_end)):
            pass
        return self.text[num_before:]

    def _begin(self, is_end: bool) -> bool:
        """Begin a turn. Return False if more text is needed."""
        match = _START.match(self._rest)
        if match is None:
            words = self._rest.lstrip()
            if not is_end and len(self._rest) < _MAX_START and words[:1] in ("", "["):
                return False
            start = self.turns[-1].end if self.turns else 0.0
            self._rest = words
            if not words:
                return False
            self.turns.append(Turn(start, start, -1, ""))
        else:
            start = _seconds(match[1])
            self.turns.append(Turn(start, start, int(match[2]), ""))
            self._rest = self._rest[match.end() :]
        self._is_open = True
        return True

    def _read_words(self, is_end: bool) -> bool:
        """Read words up to the end of the turn. Return False if more text is needed."""
        size = len(self._rest)
        at = self._rest.find("[")
        if at < 0:
            # Blanks are read with the word after them, because there are none before the end of a turn.
            kept = len(self._rest.rstrip())
            self._add(self._rest[:kept])
            self._rest = "" if is_end else self._rest[kept:]
            return False
        match = _END.match(self._rest, at)
        if match is not None:
            self._add(self._rest[:at].rstrip())
            turn = self.turns[-1]
            turn.end = max(turn.start, _seconds(match[1]))
            self._rest = self._rest[match.end() :]
            self._is_open = False
            return True
        if "]" not in self._rest[at:] and size - at < _MAX_END and not is_end:
            kept = len(self._rest[:at].rstrip())
            self._add(self._rest[:kept])
            self._rest = self._rest[kept:]
            return False
        self._add(self._rest[: at + 1])
        self._rest = self._rest[at + 1 :]
        return True

    def _add(self, words: str) -> None:
        turn = self.turns[-1]
        if not turn.text:
            words = words.lstrip()
            self.text += separator(self.text, words)
        turn.text += words
        self.text += words


def _seconds(time: str) -> float:
    """Return a time in seconds, given as such or as [hours:]minutes:seconds; 0 if it is malformed."""
    try:
        return math.fsum(float(part) * 60**i for i, part in enumerate(reversed(time.split(":"))))
    except ValueError:
        return 0.0
