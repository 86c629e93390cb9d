"""Event IDs, with which a client that was disconnected continues a stream (`Last-Event-ID`)."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from starlette.types import Scope

from ...client.engine_client import RequestGroup, Sequence
from ...http.errors import wrong
from ..streaming.event_stream import ChunkEncoder, StreamFormat, Template

HEADER: Final = "Last-Event-ID"
_HEADER: Final = HEADER.lower().encode()

MAX_SEQUENCES: Final = 32
"""Maximum sequences of a stream with event IDs, because each ID has a number for every sequence."""

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
    """Return the position in the header of a request; None without the header.

    Raises:
        APIError: The header is not an event ID of this server (400).
    """
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


class IdentifiedChunks:
    """Adds an ID to the last event of each piece that an encoder writes.

    The ID encodes how much of each sequence the client has after that event. Earlier events of the same piece have no
    ID, so a client that is disconnected between them gets the whole piece again.
    """

    __slots__ = ("_chunks", "_counts", "_start")

    def __init__(self, chunks: ChunkEncoder, answer_id: str, group: RequestGroup) -> None:
        self._chunks = chunks
        self._start = b"id: %b:" % answer_id.encode()
        self._counts = [_count_of(sequence) for sequence in group.sequences]

    @property
    def format(self) -> StreamFormat:
        """The format of the stream around the chunks."""
        return self._chunks.format

    def encode(self, sequence: Sequence) -> bytes:
        """Return the chunks of a sequence; b"" if its output needs none."""
        body = self._chunks.encode(sequence)
        self._counts[sequence.position] = _count_of(sequence)
        return self._identify(body, b".".join(self._counts)) if body else body

    def template(self) -> Template | None:
        """Return the parts of a chunk with text only, after the start of its ID."""
        template = self._chunks.template()
        return template and Template(b"\n" + template.before, template.after, self._start)

    def closing(self) -> bytes:
        """Return the chunks between the last output and the end of the stream."""
        body = self._chunks.closing()
        return self._identify(body, CLOSED.encode()) if body else body

    def _identify(self, body: bytes, counts: bytes) -> bytes:
        # JSON text has no line breaks, so an empty line marks the end of an event.
        last = body.rfind(b"\n\n", 0, -2) + 2 if body.count(b"\n\n") > 1 else 0
        return b"".join((body[:last], self._start, counts, b"\n", body[last:]))


def _count_of(sequence: Sequence) -> bytes:
    """Return the number of tokens that were read, followed by `e` if the end of the sequence was read."""
    is_end = sequence.finished and not sequence.has_updates
    return (b"%de" if is_end else b"%d") % sequence.num_read_tokens
