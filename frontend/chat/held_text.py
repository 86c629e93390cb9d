"""Find markers in text that is still arriving, and the part of it that must be held back."""

from collections.abc import Sequence
from functools import lru_cache


def find_first(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Return the position and text of the first of `markers` from `start`; the longest if several are there."""
    found = [(at, -len(m), m) for m in markers if (at := text.find(m, start)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


def may_begin(text: str, markers: Sequence[str]) -> bool:
    """Return whether `text` is empty or a prefix of a marker."""
    return any(marker.startswith(text) for marker in markers)


def start_of_marker(text: str, markers: Sequence[str]) -> int:
    """Return where a possible beginning of a marker starts at the end of `text`; its length if there is none."""
    end = len(text)
    first_chars, longest = _bounds(tuple(markers))
    start = max(0, end - longest + 1)
    if first_chars.isdisjoint(text[start:]):
        return end
    for at in range(start, end):
        if text[at] in first_chars and may_begin(text[at:], markers):
            return at
    return end


@lru_cache
def _bounds(markers: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """Return the first characters of the markers, and the length of the longest."""
    return frozenset(m[0] for m in markers), max(map(len, markers), default=1)


def start_of_held(text: str, markers: Sequence[str]) -> int:
    """Return where the text to hold back starts: final whitespace, or a possible beginning of a marker."""
    return len(text[: start_of_marker(text, markers)].rstrip())
