"""Responses that another process continues if this one crashes."""

from __future__ import annotations

import asyncio
from typing import Protocol


class ResponseRecord(Protocol):
    """A record of the bytes of a streamed response, from which another process can continue it."""

    def add(self, data: bytes) -> None:
        """Record bytes that are about to be sent after the head of the response."""

    def note(self, event_id: bytes) -> None:
        """Record the ID of an event whose bytes, which come next, do not have it."""

    def note_start(self, event_id: bytes) -> None:
        """Record the ID before the first event, if no part of the response was sent."""

    def add_end(self, data: bytes) -> None:
        """Record the last piece of the body, which is about to be sent with the end of the response."""


class HasTransport(Protocol):
    """A connection of a client."""

    transport: asyncio.Transport


class Continuation:
    """The transport of a response whose head another process has sent.

    It sends `unsent`, which that process has recorded but not sent, in place of the head. A response that has another
    status cannot continue the first one, so it ends the connection.
    """

    def __init__(self, connection: HasTransport, unsent: bytes) -> None:
        self._connection = connection
        self._unsent: bytes | None = unsent

    def is_closing(self) -> bool:
        """Return whether the connection is closed or about to be."""
        return self._connection.transport.is_closing()

    def close(self) -> None:
        """Close the connection."""
        self._connection.transport.close()

    def write(self, data: bytes) -> None:
        """Send a piece of the response. The first one is its head."""
        transport, unsent = self._connection.transport, self._unsent
        if unsent is None:
            transport.write(data)
            return
        self._unsent = None
        if not data.startswith(b"HTTP/1.1 200 "):
            transport.abort()
        elif unsent:
            transport.write(unsent)
