"""Find the first match of regular expressions in a text that arrives in pieces, in bounded time for each character.

The expressions have the syntax of Python's `re` without look-around, back-references, flags, and anchors except one: a
`$` at the end requires that the match ends with a token. All of them become one automaton, so no expression can make a
search slow: it follows all its paths at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from ...protocol.errors import ParameterError
from ..http.shown_values import echo
from .stop_strings import Match, StopStrings

MAX_POSITIONS: Final = 500
"""Maximum characters that expressions match, with repetitions written out. It bounds the time of a step."""

MAX_NESTING: Final = 50
"""Maximum depth of groups in an expression."""

_CACHED_STEPS: Final = 4096
"""Maximum cached steps of an automaton."""

_CACHED_AUTOMATA: Final = 64

_ESCAPE: Final = r"\\(?:[dDwWsSnrtfv0]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^a-zA-Z0-9])"
_ATOM: Final = re.compile(rf"{_ESCAPE}|\[\^?\]?(?:{_ESCAPE}|[^\]\\])*\]|[^\\()|*+?\[^$]", re.DOTALL)
"""An expression for one character: an escape, a class, or a character that stands for itself, or the dot."""
_GROUP: Final = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))")
_REPEAT: Final = re.compile(r"(?:[*+?]|\{(\d{0,5}),(\d{0,5})\}|\{(\d{1,5})\})\??")
_END: Final = re.compile(r"(?:\$|\\[Zz])(?=\||\Z)")
"""An anchor at the end of an expression or of one of its alternatives."""


class _Part(NamedTuple):
    """A part of an expression: the positions where its matches begin and end, and True if it matches the empty text.

    Sets of positions are integers with a bit for each position.
    """

    first: int
    last: int
    is_empty: bool


_NOTHING: Final = _Part(0, 0, True)


class _Automaton:
    """Glushkov's automaton of several expressions: a position for each character that they match.

    Attributes:
        anchored: The positions where a match ends only if a token ends there.
    """

    def __init__(self, expressions: tuple[str, ...]) -> None:
        self._positions: dict[re.Pattern[str], int] = {}
        """The positions of each expression for one character."""
        self._next: list[int] = []
        self._words: list[tuple[int, str]] = []
        self._first = self.anchored = 0
        for expression in expressions:
            self._text, self._at = expression, 0
            part = self._alternatives(0)
            if self._at < len(expression):
                raise self._error("has a ) without (")
            if part.is_empty:
                raise self._error("must not match the empty text")
            self._first |= part.first
            self._words.append((part.last, expression))
        self._steps: dict[tuple[int, str, bool], tuple[int, str | None]] = {}

    def step(self, states: int, character: str, *, is_last: bool) -> tuple[int, str | None]:
        """Return the positions after one more character, and the expression that matches there, if one does.

        `is_last` is set for the last character of a token.
        """
        key = states, character, is_last
        found = self._steps.get(key)
        if found is None:
            wanted = self._first
            for position in _bits(states):
                wanted |= self._next[position]
            reached = 0
            for pattern, positions in self._positions.items():
                if wanted & positions and pattern.fullmatch(character):
                    reached |= wanted & positions
            counts = reached if is_last else reached & ~self.anchored
            word = next((word for last, word in self._words if counts & last), None)
            if len(self._steps) >= _CACHED_STEPS:
                self._steps.clear()
            found = self._steps[key] = reached, word
        return found

    def _error(self, problem: str) -> ParameterError:
        return ParameterError("stop_regex", f"{problem}, got {echo(self._text)} at {self._at}")

    def _alternatives(self, depth: int) -> _Part:
        if depth > MAX_NESTING:
            raise self._error(f"must have at most {MAX_NESTING} groups in each other")
        parts = [self._sequence(depth)]
        while self._text.startswith("|", self._at):
            self._at += 1
            parts.append(self._sequence(depth))
        first = last = 0
        for part in parts:
            first, last = first | part.first, last | part.last
        return _Part(first, last, any(part.is_empty for part in parts))

    def _sequence(self, depth: int) -> _Part:
        whole = _NOTHING
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if not depth and (end := _END.match(self._text, self._at)) is not None:
                if end[0] == "$":
                    # It also matches before a line feed at the end.
                    whole = self._join(whole, self._position("\n")._replace(is_empty=True))
                self.anchored |= whole.last
                self._at = end.end()
                break
            whole = self._join(whole, self._repeated(depth))
        return whole

    def _join(self, left: _Part, right: _Part) -> _Part:
        if right.first:
            for position in _bits(left.last):
                self._next[position] |= right.first
        return _Part(
            left.first | right.first if left.is_empty else left.first,
            left.last | right.last if right.is_empty else right.last,
            left.is_empty and right.is_empty,
        )

    def _repeated(self, depth: int) -> _Part:
        begin, num_before = self._at, len(self._next)
        part = self._single(depth)
        repeat = _REPEAT.match(self._text, self._at)
        if repeat is None:
            return part
        least, most = _bounds(repeat)
        if most is not None and most < least:
            raise self._error(
                f"has the greatest number of repetitions {most} below the least, {least}"
            )
        num_copies = most or max(least, 1)
        if (len(self._next) - num_before) * num_copies + num_before > MAX_POSITIONS:
            raise self._error(f"must match at most {MAX_POSITIONS} characters")
        whole = _NOTHING
        # A part without positions matches the empty text, however often it is repeated.
        for copy in range(num_copies if most != 0 and part.first else 0):
            if copy:
                self._at = begin
                part = self._single(depth)
            if most is None and copy == num_copies - 1:
                self._join(part, part)
            whole = self._join(whole, part._replace(is_empty=part.is_empty or copy >= least))
        self._at = repeat.end()
        if (again := _REPEAT.match(self._text, self._at)) is not None:
            raise self._error(f"must not repeat a repetition ({again[0]})")
        return whole

    def _single(self, depth: int) -> _Part:
        """Read a group or an expression for one character."""
        if (group := _GROUP.match(self._text, self._at)) is not None:
            self._at = group.end()
            part = self._alternatives(depth + 1)
            if not self._text.startswith(")", self._at):
                raise self._error("has a ( without )")
            self._at += 1
            return part
        atom = _ATOM.match(self._text, self._at)
        if atom is None:
            raise self._error("has an anchor, a look-around, or another part that cannot be used")
        part = self._position(atom[0])
        self._at = atom.end()
        return part

    def _position(self, atom: str) -> _Part:
        """Add a position for an expression for one character."""
        try:
            pattern = re.compile(atom)
        except re.error as error:
            raise self._error(f"is invalid ({error})") from None
        position = len(self._next)
        if position >= MAX_POSITIONS:
            raise self._error(f"must match at most {MAX_POSITIONS} characters")
        self._positions[pattern] = self._positions.get(pattern, 0) | 1 << position
        self._next.append(0)
        return _Part(1 << position, 1 << position, False)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _bounds(repeat: re.Match[str]) -> tuple[int, int | None]:
    """Return the least and the greatest number of repetitions; None if there is no greatest one."""
    kind = repeat[0][0]
    if kind != "{":
        return (1 if kind == "+" else 0), (1 if kind == "?" else None)
    if repeat[3] is not None:
        return int(repeat[3]), int(repeat[3])
    return int(repeat[1] or 0), int(repeat[2]) if repeat[2] else None


_automaton = lru_cache(maxsize=_CACHED_AUTOMATA)(_Automaton)


def verify_patterns(expressions: tuple[str, ...]) -> None:
    """Verify that expressions can be searched for.

    Raises:
        ParameterError: An expression is invalid or too large, or can match the empty text.
    """
    _automaton(expressions)


class StopPatterns:
    """The matching state of one text, for strings and expressions. The match that ends first wins.

    The text of an expression's match is kept: it ends where the shortest match is complete.
    """

    __slots__ = ("_automaton", "_states", "_strings")

    def __init__(self, strings: tuple[str, ...], expressions: tuple[str, ...]) -> None:
        self._strings = StopStrings(strings)
        self._automaton = _automaton(expressions)
        self._states = 0

    @property
    def needs_tokens(self) -> bool:
        """True if each piece must be the text of one token."""
        return self._automaton.anchored != 0

    @property
    def num_possible(self) -> int:
        """The number of characters at the end of the text that may begin a match of a string."""
        return self._strings.num_possible

    def find(self, piece: str, *, is_protected: bool = False) -> Match | None:
        """Return the first match that ends in the next piece, or None.

        If `is_protected`, matches in the piece do not count.
        """
        found = self._strings.find(piece, is_protected=is_protected)
        for end, character in enumerate(piece if found is None else piece[: found.end - 1], 1):
            is_last = end == len(piece)
            self._states, word = self._automaton.step(self._states, character, is_last=is_last)
            if word is not None and not is_protected:
                return Match(end, end, word)
        return found
