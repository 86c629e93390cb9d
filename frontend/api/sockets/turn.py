"""Answer a message of a WebSocket as if it were the body of a request: the events of the answer become messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Scope

from ...http.errors import APIError
from ...http.websocket import Message as SocketMessage
from ...http.websocket import WebSocket, WebSocketClosed

_EVENT_END: Final = b"\n\n"
_DATA: Final = b"data: "

_COPIED: Final = ("http_version", "scheme", "server", "client", "root_path", "path", "raw_path")
"""The parts of the handshake that its messages share."""

_OF_ONE_MESSAGE: Final = frozenset(
    {
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"transfer-encoding",
        b"x-request-id",
    }
)
"""Headers that describe the handshake only."""


class Turn:
    """A stand-in for the client's connection: it sends one message as the body, and the answer as messages.

    Args:
        socket: The WebSocket.
        message: The message.
    """

    has_chunks = True

    def __init__(self, socket: WebSocket, message: SocketMessage) -> None:
        self._socket = socket
        self._message: SocketMessage | None = message
        self._status = 0
        self._headers: dict[str, str] = {}
        self._error = b""

    @property
    def is_paused(self) -> bool:
        """True while the client does not read."""
        return self._socket.is_paused

    @property
    def on_writable(self) -> Callable[[], None] | None:
        """Called when the client reads again or disconnects."""
        return self._socket.on_writable

    @on_writable.setter
    def on_writable(self, function: Callable[[], None] | None) -> None:
        self._socket.on_writable = function

    def begin_stream(self) -> None:
        """Do nothing, because messages need no preparation."""

    def write_chunk(self, data: bytes) -> None:
        """Send each event of a chunk as a message. Comments are left out: pings keep the connection open."""
        for event in data.split(_EVENT_END):
            _, _, content = event.rpartition(_DATA) if event[:1] != b":" else (b"", b"", b"")
            if content:
                self._socket.send(content)

    def close_now(self) -> None:
        """Close the WebSocket, because the server stops before the answer has ended."""
        self._socket.close()

    async def answer(self, app: ASGIApp, handshake: Scope, state: Mapping[str, Any]) -> None:
        """Answer the message with the POST route of the WebSocket's path.

        Args:
            app: The application.
            handshake: The ASGI scope of the WebSocket's handshake.
            state: Further entries of the state of the request.
        """
        assert self._message is not None
        headers = [field for field in handshake["headers"] if field[0] not in _OF_ONE_MESSAGE]
        length = str(len(self._message.text)).encode()
        headers += [(b"content-type", b"application/json"), (b"content-length", length)]
        scope = {name: handshake[name] for name in _COPIED} | {
            "type": "http",
            "method": "POST",
            "query_string": b"",
            "headers": headers,
            "state": {**state, "connection": self},
        }
        try:
            await app(scope, self._receive, self._send)
        finally:
            self.release()

    def release(self) -> None:
        """Release the memory of the message, if nothing has read it."""
        if self._message is not None:
            with self._message.lease:
                self._message = None

    async def _receive(self) -> Message:
        if self._message is not None:
            # Whoever reads a body counts its memory.
            text = self._message.text
            self.release()
            return {"type": "http.request", "body": text, "more_body": False}
        await self._socket.closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {str(k, "latin-1"): str(v, "latin-1") for k, v in message["headers"]}
            return
        body = message.get("body", b"")
        if self._status < 400:
            self.write_chunk(body)
            try:
                await self._socket.wait_until_writable()
            except WebSocketClosed:
                # The application learns it from `receive`.
                return
            return
        self._error += body
        if not message.get("more_body", False):
            error = msgspec.json.decode(self._error)["error"]
            send_error(self._socket, self._status, error, self._headers.get("retry-after"))


def send_error(
    socket: WebSocket, status: int, error: Mapping[str, Any], retry_after: str | None = None
) -> None:
    """Send the event of an error that occurred before the response existed.

    Args:
        socket: The WebSocket.
        status: The HTTP status that a request would have got.
        error: The fields of the error.
        retry_after: Seconds after which the client may try again.
    """
    event: dict[str, Any] = {"type": "error", "status": status, "error": error}
    if retry_after is not None:
        event["headers"] = {"retry-after": retry_after}
    socket.send(msgspec.json.encode(event))


def send_api_error(socket: WebSocket, error: APIError) -> None:
    """Send the event of an APIError."""
    send_error(socket, error.status, error.body["error"], error.headers.get("retry-after"))
