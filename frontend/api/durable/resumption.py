"""Resumption: the answer to a client that returns for a recorded request, read through the store."""

from __future__ import annotations

from typing import Self

from ...client.engine_client import RequestGroup, Sequence
from ...http.errors import APIError, echo
from ...store.client import Attachment
from ..generation import Origin, PreparedPrompt, sequence_requests
from ..schema import GenerationRequest
from ..serving import Serving
from ..streaming.event_stream import ChunkEncoder, StreamFormat
from .event_positions import EventPosition
from .mirror import Mirror, abort_mirror
from .records import RequestRecord, decode_record


class Resumption:
    """A recorded request that is read through the store. Enter it as a context while it is read.

    Attributes:
        record: The record of the request.
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
        """Return the sequences of the request, which have no tokens yet."""
        sequences = await sequence_requests(serving, request, prompts, Origin())
        return await serving.engine.groups.mirror(
            sequences, request_id=self.record.request_id, on_abort=abort_mirror
        )

    async def read_silently(self, group: RequestGroup, chunks: ChunkEncoder) -> None:
        """Skip the output that the client has, and add the rest to the group.

        Raises:
            APIError: The client's position does not belong to this request (400), or was not reached again in time
                (503).
        """
        position = self._position
        if position is not None and (position.counts or position.is_closed):
            await self._mirror.read_silently(group, position, chunks)
        self._mirror.open(group)

    def open(self, group: RequestGroup) -> None:
        """Add all output to the group."""
        self._mirror.open(group)

    def without_end(self, chunks: ChunkEncoder) -> ChunkEncoder:
        """Return the encoder; if the client already has the closing chunks, without them."""
        has_end = self._position is not None and self._position.is_closed
        return _WithoutEnd(chunks) if has_end else chunks


async def find_resumption(
    serving: Serving, request_id: str, owner: str, position: EventPosition | None = None
) -> Resumption:
    """Return a recorded request.

    Raises:
        APIError: The owner has no such request (404), or another version recorded it (410).
        StoreError: The store does not answer (503).
    """
    mirror = Mirror()
    attachment = await serving.store.attach(request_id, owner, mirror.on_update)
    if attachment is None:
        raise APIError(
            404,
            f"The request {echo(request_id)} does not exist or was deleted; send it again "
            "without Last-Event-ID",
            code="request_not_found",
        )
    try:
        record = decode_record(attachment.record)
    except APIError:
        attachment.close()
        raise
    return Resumption(attachment, record, mirror, position)


class _WithoutEnd(ChunkEncoder):
    """An encoder that omits the chunks after the last output."""

    def __init__(self, chunks: ChunkEncoder) -> None:
        self._chunks = chunks

    @property
    def format(self) -> StreamFormat:
        return self._chunks.format

    def encode(self, sequence: Sequence) -> bytes:
        return self._chunks.encode(sequence)
