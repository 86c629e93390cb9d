"""Pass requests on to the server of a model, and its answers to the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import h11
from starlette.types import Receive, Scope, Send

from ..api.bodies.disconnection import while_connected
from ..http.errors import unavailable
from ..http.websocket import INTERNAL_ERROR, OFFER, Lease, WebSocketClosed, open_websocket
from .children import Child, Children

logger = logging.getLogger(__name__)

RETRY_S: Final = 1.0
PIECE_BYTES: Final = 1 << 16

_OF_CONNECTION: Final = frozenset(
    {
        b"connection",
        b"expect",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that describe a connection, and are not passed on (RFC 9110, 7.6.1)."""

_NOT_SENT: Final = _OF_CONNECTION | {b"content-length", b"origin", b"x-request-id"}
_NOT_RETURNED: Final = _OF_CONNECTION | {b"date", b"x-request-id"}

_Headers = list[tuple[bytes, bytes]]


async def pass_on(
    children: Children,
    candidates: Sequence[Child],
    body: bytes,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answer a request with the answer of the first of several models that does not answer 404.

    Raises:
        APIError: The server of a model ended before its answer (503).
        EngineError: A model does not load.
        ClientDisconnected: The client closed the connection first.
    """

    async def answer() -> None:
        for child in candidates:
            async with children.use(child), _open(child, scope, body) as answered:
                response = await answered.read_head()
                if response.status_code == 404 and child is not candidates[-1]:
                    continue
                await _send_back(response, answered, scope, send)
                return

    await while_connected(receive, answer())


class _Answer:
    """The answer of a model's server."""

    def __init__(self, reader: asyncio.StreamReader, parser: h11.Connection) -> None:
        self._reader = reader
        self._parser = parser

    async def read_head(self) -> h11.Response:
        """Return the status and the headers."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event

    async def read_body(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    async def _next(self) -> object:
        while (event := self._parser.next_event()) is h11.NEED_DATA:
            self._parser.receive_data(await self._reader.read(PIECE_BYTES))
        return event


@asynccontextmanager
async def _open(child: Child, scope: Scope, body: bytes) -> AsyncIterator[_Answer]:
    """Send a request to a model's server, whose connection is closed at the end of this context."""
    parser = h11.Connection(h11.CLIENT)
    headers = _headers_for(scope)
    if body or scope["method"] not in ("GET", "HEAD", "DELETE"):
        headers.append((b"content-length", b"%d" % len(body)))
    request = h11.Request(method=scope["method"], target=_target(scope), headers=headers)
    try:
        reader, writer = await asyncio.open_unix_connection(child.socket)
        try:
            for part in (request, h11.Data(body), h11.EndOfMessage()):
                writer.write(parser.send(part) or b"")
            await writer.drain()
            yield _Answer(reader, parser)
        finally:
            writer.close()
    except (OSError, h11.ProtocolError) as error:
        child.notice_exit()
        raise unavailable(
            f"the server of the model {child.model.name} has ended: {error}", RETRY_S
        ) from error


async def _send_back(response: h11.Response, answer: _Answer, scope: Scope, send: Send) -> None:
    headers = [(k, v) for k, v in response.headers if k not in _NOT_RETURNED]
    if b"content-length" not in dict(headers):
        scope["state"]["connection"].begin_stream()
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    async for piece in answer.read_body():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def pass_on_websocket(
    children: Children,
    child: Child,
    scope: Scope,
    send: Send,
    max_bytes: int,
    new_lease: Callable[[], Lease],
) -> None:
    """Connect the WebSocket of a client with one of a model's server.

    Raises:
        APIError: The handshake is not valid (400, 426), or the server does not accept it.
        EngineError: The model does not load.
    """
    # A late import, because few clients open WebSockets.
    from websockets.asyncio.client import unix_connect
    from websockets.exceptions import ConnectionClosed, InvalidStatus

    headers = [(str(k, "latin-1"), str(v, "latin-1")) for k, v in _headers_for(scope)]
    wanted = [each for each in headers if not each[0].startswith(("sec-websocket", "host"))]
    url = f"ws://localhost{_target(scope).decode('latin-1')}"
    async with children.use(child):
        try:
            inner = await unix_connect(
                child.socket, url, additional_headers=wanted, max_size=None, compression=None
            )
        except (OSError, InvalidStatus) as error:
            raise unavailable(
                f"the model {child.model.name} accepts no WebSocket: {error}", RETRY_S
            ) from error
        async with inner:
            with await open_websocket(scope, send, max_bytes, new_lease) as outer:

                async def to_client() -> None:
                    with suppress(WebSocketClosed):
                        async for text in inner:
                            outer.send(text if isinstance(text, bytes) else text.encode())
                            await outer.wait_until_writable()
                        outer.close(inner.close_code or INTERNAL_ERROR, inner.close_reason or "")

                sending = asyncio.create_task(to_client())
                try:
                    with suppress(WebSocketClosed, ConnectionClosed):
                        while True:
                            message = await outer.receive()
                            with message.lease:
                                await inner.send(message.text, text=True)
                finally:
                    sending.cancel()
                    await asyncio.wait({sending})


def is_websocket(scope: Scope) -> bool:
    """Return whether a client asks for a WebSocket."""
    return bool(scope["state"].get(OFFER))


def _headers_for(scope: Scope) -> _Headers:
    headers = [(k, v) for k, v in scope["headers"] if k not in _NOT_SENT]
    return [*headers, (b"x-request-id", scope["state"]["request_id"].encode())]


def _target(scope: Scope) -> bytes:
    path: bytes = scope["raw_path"].removeprefix(scope["root_path"].encode()) or b"/"
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path
