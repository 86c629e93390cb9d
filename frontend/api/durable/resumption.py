"""The answer to a client that returns: what was generated meanwhile, and the rest."""

from __future__ import annotations

from typing import Self

from ...client.engine_client import RequestGroup, Sequence
from ...http.errors import APIError, echo
from ...store.client import Attachment
from ..generation import PreparedPrompt, sequence_requests
from ..schema import GenerationRequest
from ..serving import Serving
from ..streaming.event_stream import ChunkEncoder, StreamFormat
from .event_ids import EventPosition
from .mirror import Mirror, abort_mirror
from .records import RequestRecord, decode_record


class Resumption:
    """A recorded request that is read through the store, to be entered until it was read.

    Attributes:
        record: What is recorded about it.
    """

    def __init__(
        self,
        attachment: Attachment,
        record: RequestRecord,
        mirror: Mirror,
        position: EventPosition | None,
    ) -> None:
        self._attachment = attachment
        self.record = record
        self._mirror = mirror
        self._position = position

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._attachment.close()

    async def mirror(
        self, serving: Serving, request: GenerationRequest, prompts: list[PreparedPrompt]
    ) -> RequestGroup:
        """Return the sequences of the request, still without tokens."""
        sequences = await sequence_requests(serving, request, prompts)
        return await serving.engine.groups.mirror(
            sequences, request_id=self.record.request_id, on_abort=abort_mirror
        )

    async def read_silently(self, group: RequestGroup, chunks: ChunkEncoder) -> None:
        """Skip what the client has, and feed the rest to the group.

        Raises:
            APIError: The client's position is none of this request (400), or was not reached again (503).
        """
        position = self._position
        if position is not None and (position.counts or position.is_closed):
            await self._mirror.read_silently(group, position, chunks)
        self._mirror.open(group)

    def open(self, group: RequestGroup) -> None:
        """Feed everything to the group."""
        self._mirror.open(group)

    def without_end(self, chunks: ChunkEncoder) -> ChunkEncoder:
        """Return an encoder without the closing chunks, if the client has them."""
        has_end = self._position is not None and self._position.is_closed
        return _WithoutEnd(chunks) if has_end else chunks


async def find_resumption(
    serving: Serving, request_id: str, owner: str, position: EventPosition | None = None
) -> Resumption:
    """Return a recorded request.

    Raises:
        APIError: There is none of this ID for this owner (404), or another version recorded it (410).
        StoreError: The store does not answer (503).
    """
    mirror = Mirror()
    attachment = await serving.store.attach(request_id, owner, mirror.on_news)
    if attachment is None:
        raise APIError(
            404,
            f"The request {echo(request_id)} is not known here, or no longer; send it again without Last-Event-ID",
            code="request_not_found",
        )
    try:
        record = decode_record(attachment.record)
    except APIError:
        attachment.close()
        raise
    return Resumption(attachment, record, mirror, position)


class _WithoutEnd:
    """An encoder without the chunks that come after the last output."""

    def __init__(self, chunks: ChunkEncoder) -> None:
        self._chunks = chunks

    @property
    def format(self) -> StreamFormat:
        return self._chunks.format

    def encode(self, sequence: Sequence) -> bytes:
        return self._chunks.encode(sequence)

    def closing(self) -> bytes:
        return b""
