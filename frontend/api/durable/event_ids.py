"""Streams whose events have IDs, with which a client that was disconnected continues them."""

from __future__ import annotations

from ...client.engine_client import RequestGroup, Sequence
from ...http.continued_response import ResponseRecord
from ..streaming.event_stream import ChunkEncoder, StreamFormat, Template
from .event_positions import CLOSED


class IdentifiedChunks:
    """Adds an ID to the last event of each piece that an encoder writes.

    The ID encodes how much of each sequence the client has after that event. Earlier events of the same piece have no
    ID, so a client that is disconnected between them gets the whole piece again.

    If the format of the stream has no IDs, they are only recorded in `sent`, the record of the connection if there is
    one.
    """

    __slots__ = ("_chunks", "_counts", "_has_ids", "_sent", "_start")

    def __init__(
        self,
        chunks: ChunkEncoder,
        answer_id: str,
        group: RequestGroup,
        sent: ResponseRecord | None = None,
    ) -> None:
        self._chunks = chunks
        self._has_ids = chunks.format.has_ids
        self._sent = sent
        self._start = b"id: %b:" % answer_id.encode()
        self._counts = [_count_of(sequence) for sequence in group.sequences]
        if sent is not None:
            sent.note_start(self._id(b".".join(self._counts)))

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
        template = self._chunks.template() if self._has_ids else None
        return template and Template(b"\n" + template.before, template.after, self._start)

    def closing(self) -> bytes:
        """Return the chunks between the last output and the end of the stream."""
        body = self._chunks.closing()
        return self._identify(body, CLOSED.encode()) if body else body

    def _id(self, counts: bytes) -> bytes:
        return self._start.removeprefix(b"id: ") + counts

    def _identify(self, body: bytes, counts: bytes) -> bytes:
        if not self._has_ids:
            if self._sent is not None:
                self._sent.note(self._id(counts))
            return body
        # JSON text has no line breaks, so an empty line marks the end of an event.
        last = body.rfind(b"\n\n", 0, -2) + 2 if body.count(b"\n\n") > 1 else 0
        return b"".join((body[:last], self._start, counts, b"\n", body[last:]))


def _count_of(sequence: Sequence) -> bytes:
    """Return the number of tokens that were read, followed by `e` if the end of the sequence was read."""
    is_end = sequence.finished and not sequence.has_updates
    return (b"%de" if is_end else b"%d") % sequence.num_read_tokens
