"""Find markers in text that is still arriving, and the part of it that must be held back."""

from collections.abc import Sequence


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
    first_chars = {marker[0] for marker in markers}
    longest = max((len(marker) for marker in markers), default=1)
    for at in range(max(0, end - longest + 1), end):
        if text[at] in first_chars and may_begin(text[at:], markers):
            return at
    return end


def start_of_held(text: str, markers: Sequence[str]) -> int:
    """Return where the text to hold back starts: final whitespace, or a possible beginning of a marker."""
    return len(text[: start_of_marker(text, markers)].rstrip())
