"""Event IDs, with which a client that was disconnected continues a stream (`Last-Event-ID`)."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from starlette.types import Scope

from ...http.errors import wrong

HEADER: Final = "Last-Event-ID"
_HEADER: Final = HEADER.lower().encode()

MAX_SEQUENCES: Final = 32
"""Maximum sequences of a stream with event IDs, because each ID has a number for every sequence."""

POSITION: Final = "event_position"
"""The key of a position in the state of a request by which a frontend continues the response of another one."""

CLOSED: Final = "done"
"""The end of an ID after the last event, in place of the numbers."""

_ID = re.compile(
    rf"(?P<request>[!-~]{{1,256}}):(?P<counts>\d{{1,10}}e?(?:\.\d{{1,10}}e?)*|{CLOSED})"
)


class EventPosition(NamedTuple):
    """A position in a stream: how many tokens of each sequence the client has, and whether it has the end.

    With empty `counts` the client has nothing; if `is_closed`, it has everything.
    """

    request_id: str
    counts: tuple[tuple[int, bool], ...] = ()
    is_closed: bool = False


def read_last_event_id(scope: Scope) -> EventPosition | None:
    """Return the position in the header of a request, or the one that its state has; None without both.

    Raises:
        APIError: The header is not an event ID of this server (400).
    """
    position: EventPosition | None = scope["state"].get(POSITION)
    if position is not None:
        return position
    for name, value in scope["headers"]:
        if name == _HEADER and value.strip():
            return parse_event_id(value.decode("latin-1").strip())
    return None


def parse_event_id(text: str) -> EventPosition:
    """Return the position that an event ID encodes.

    Raises:
        APIError: The text is not an event ID of this server (400).
    """
    match = _ID.fullmatch(text)
    if match is None or match["counts"].count(".") >= MAX_SEQUENCES:
        raise wrong(HEADER, "the id of an event of this server, such as chatcmpl-1a2b:12", text)
    if match["counts"] == CLOSED:
        return EventPosition(match["request"], is_closed=True)
    counts = [(int(part.rstrip("e")), part.endswith("e")) for part in match["counts"].split(".")]
    return EventPosition(match["request"], tuple(counts))
