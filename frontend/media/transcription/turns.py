"""Answers of models that write who speaks when."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final

from .segments import Turn, separator

_START: Final = re.compile(r"\s*\[([\d.:]{1,12})\]\s*\[S(\d{1,4})\]")
_END: Final = re.compile(r"\[([\d.:]{1,12})\]")

_OBJECT: Final = re.compile(
    r'\s*(?:assistant)?[\s\[\]},]*\{\s*"Start"\s*:\s*(\d{1,6}(?:\.\d{1,6})?)\s*,'
    r'\s*"End"\s*:\s*(\d{1,6}(?:\.\d{1,6})?)\s*,'
    r'(?:\s*"Speaker"\s*:\s*(\d{1,4})\s*,)?\s*"Content"\s*:\s*"'
)
_CLOSED: Final = re.compile(r"[\s\]},]*")
_STRING: Final = re.compile(r'((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*+)("?)')

_HALF: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
_ROLE: Final = "assistant"

_MAX_OBJECT: Final = 160
"""Maximum characters of what begins a turn in JSON."""

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


class TurnReader(ABC):
    """Reads turns from an answer that arrives in pieces. Text outside turns counts as words of an unknown speaker.

    Attributes:
        turns: The turns so far. The last one may still be open.
        text: The words of all turns.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.text = ""
        self._num_taken = 0
        self._rest = ""
        self._is_open = False

    def feed(self, text: str, *, is_end: bool = False) -> str:
        """Return what a piece of the answer adds to the text. The last piece has `is_end`."""
        self._rest += text
        num_before = len(self.text)
        while self._rest and (self._read_words(is_end) if self._is_open else self._begin(is_end)):
            pass
        return self.text[num_before:]

    def take_ended(self, *, is_end: bool) -> list[Turn]:
        """Return the turns that have words and have ended since the last call; all the rest if `is_end`."""
        num_ended = len(self.turns) - (self._is_open and not is_end)
        ended = self.turns[self._num_taken : num_ended]
        self._num_taken = num_ended
        return [turn for turn in ended if turn.text]

    @abstractmethod
    def _begin(self, is_end: bool) -> bool:
        """Begin a turn. Return False if more text is needed."""

    @abstractmethod
    def _read_words(self, is_end: bool) -> bool:
        """Read words up to the end of the turn. Return False if more text is needed."""

    def _open_turn(self, start: float, end: float, speaker: int, num_read: int) -> bool:
        """Begin a turn after the next `num_read` characters, and return True."""
        self.turns.append(Turn(start, end, speaker, ""))
        self._rest = self._rest[num_read:]
        self._is_open = True
        return True

    def _add(self, words: str) -> None:
        turn = self.turns[-1]
        if not turn.text:
            words = words.lstrip()
            self.text += separator(self.text, words)
        turn.text += words
        self.text += words


class MarkedTurns(TurnReader):
    """Reads turns whose times and speakers are in brackets: `[0.00][S01]Good morning.[1.52]`."""

    def _begin(self, is_end: bool) -> bool:
        match = _START.match(self._rest)
        if match is not None:
            start = _seconds(match[1])
            return self._open_turn(start, start, int(match[2]), match.end())
        words = self._rest.lstrip()
        if not is_end and len(self._rest) < _MAX_START and words[:1] in ("", "["):
            return False
        if not words:
            self._rest = ""
            return False
        start = self.turns[-1].end if self.turns else 0.0
        return self._open_turn(start, start, -1, len(self._rest) - len(words))

    def _read_words(self, is_end: bool) -> bool:
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


class JsonTurns(TurnReader):
    """Reads turns that are JSON: `[{"Start":0.0,"End":1.52,"Speaker":0,"Content":"Good morning."}]`."""

    _is_json = True

    def _begin(self, is_end: bool) -> bool:
        match = _OBJECT.match(self._rest)
        if match is not None:
            speaker = -1 if match[3] is None else int(match[3])
            return self._open_turn(float(match[1]), float(match[2]), speaker, match.end())
        if _CLOSED.fullmatch(self._rest):
            return False
        begun = self._rest.strip()
        is_begun = _ROLE.startswith(begun) or begun.removeprefix(_ROLE).lstrip()[:1] in "[]{},"
        if not is_end and len(self._rest) < _MAX_OBJECT and is_begun:
            return False
        self._is_json = False
        start = self.turns[-1].end if self.turns else 0.0
        return self._open_turn(start, start, -1, 0)

    def _read_words(self, is_end: bool) -> bool:
        match = _STRING.match(self._rest) if self._is_json else None
        if match is None:
            kept = len(self._rest.rstrip())
            self._add(self._rest[:kept])
            self._rest = "" if is_end else self._rest[kept:]
            return False
        is_closed = bool(match[2])
        # Blanks are read with the word after them, and so is the first half of a character.
        words = match[1].rstrip() if is_closed or is_end else _HALF.sub("", match[1].rstrip())
        self._add(_unescape(words))
        self._rest = self._rest[match.end() if is_closed else len(words) :]
        if is_end and not is_closed:
            self._rest = ""
        self._is_open = not is_closed
        return is_closed


def make_reader(turns: str) -> TurnReader:
    """Return a reader of answers in a format of `SpeechFormat.turns`."""
    return JsonTurns() if turns == "json" else MarkedTurns()


def _unescape(words: str) -> str:
    """Return the content of a JSON string, or the string itself if it is malformed."""
    try:
        found: str = json.loads(f'"{words}"', strict=False)
    except ValueError:
        return words
    return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _seconds(time: str) -> float:
    """Return a time in seconds, given as seconds or [hours:]minutes:seconds; 0 if it is malformed."""
    try:
        return math.fsum(float(part) * 60**i for i, part in enumerate(reversed(time.split(":"))))
    except ValueError:
        return 0.0
