"""Pass requests on to the server of a model, and its answers to the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import compress
from typing import Final

import h11
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..api.bodies.disconnection import while_connected
from ..http.errors import APIError, unavailable
from ..http.websocket import INTERNAL_ERROR, OFFER, Lease, WebSocketClosed, open_websocket
from .children import Child, Children

logger = logging.getLogger(__name__)

RETRY_S: Final = 1.0
MAX_IDLE: Final = 128
"""Maximum number of unused connections to one server."""
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
    connections: Connections,
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
            async with (
                children.use(child),
                connections.ask(child, scope, body) as (response, answered),
            ):
                if response.status_code == 404 and child is not candidates[-1]:
                    continue
                await _send_back(response, answered, scope, send)
                return

    await while_connected(receive, answer())


async def ask(
    children: Children, connections: Connections, child: Child, body: bytes, scope: Scope
) -> Response:
    """Return the whole answer of a model.

    Raises:
        APIError: The server of the model ended before its answer (503).
        EngineError: The model does not load.
    """
    async with (
        children.use(child),
        connections.ask(child, scope, body) as (response, answered),
    ):
        content = b"".join([piece async for piece in answered.read_body()])
    kind = dict(response.headers).get(b"content-type")
    return Response(content, response.status_code, media_type=kind.decode() if kind else None)


async def find_only(
    children: Children, connections: Connections, candidates: Sequence[Child], scope: Scope
) -> Child:
    """Return the only one of several models that answers a request without a body; the first if none does.

    Raises:
        APIError: Several models answer (409), or the server of a model ended before its answer (503).
        EngineError: A model does not load.
    """

    async def answers(child: Child) -> bool:
        async with children.use(child), connections.ask(child, scope, b"") as (response, _):
            return response.status_code < 400

    answering = await asyncio.gather(*map(answers, candidates))
    found = list(compress(candidates, answering))
    if len(found) > 1:
        names = ", ".join(child.model.name for child in found)
        raise APIError(
            409,
            f"Several models have a stream of this conversation: {names}; add model=NAME to the query",
            param="model",
        )
    return found[0] if found else candidates[0]


class Connection:
    """A connection to a model's server, for one request after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = h11.Connection(h11.CLIENT)

    @property
    def is_open(self) -> bool:
        """False if the server has closed the connection."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def ask(self, request: h11.Request, body: bytes) -> h11.Response:
        """Send a request, and return the status and the headers of the answer.

        Raises:
            OSError: The server has closed the connection.
            h11.ProtocolError: It has closed the connection, or its answer is invalid.
        """
        for part in (request, h11.Data(body), h11.EndOfMessage()):
            self._writer.write(self._parser.send(part) or b"")
        await self._writer.drain()
        while not isinstance(event := await self._next(), h11.Response):
            pass
        return event

    async def read_body(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the answer's body."""
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    def end_request(self) -> bool:
        """Prepare for the next request. Return whether that is possible, because the answer was read to its end."""
        if self._parser.our_state is not h11.DONE or self._parser.their_state is not h11.DONE:
            return False
        self._parser.start_next_cycle()
        return self.is_open

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def _next(self) -> object:
        while (event := self._parser.next_event()) is h11.NEED_DATA:
            self._parser.receive_data(await self._reader.read(PIECE_BYTES))
        return event


class Connections:
    """The open connections to the servers of all models, which requests use one after another."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Connection]] = {}

    @asynccontextmanager
    async def ask(
        self, child: Child, scope: Scope, body: bytes
    ) -> AsyncIterator[tuple[h11.Response, Connection]]:
        """Send a request to a model's server. Its answer must be read before the end of this context.

        Raises:
            APIError: The server has ended (503).
        """
        headers = _headers_for(scope)
        if body or scope["method"] not in ("GET", "HEAD", "DELETE"):
            headers.append((b"content-length", b"%d" % len(body)))
        request = h11.Request(method=scope["method"], target=_target(scope), headers=headers)
        connection = None
        try:
            response, connection = await self._answer(child.socket, request, body)
            yield response, connection
            self._keep(child.socket, connection)
            connection = None
        except (OSError, h11.ProtocolError) as error:
            child.notice_exit()
            problem = "closed the connection before the end of its answer"
            raise unavailable(
                f"the server of the model {child.model.name} {problem}", RETRY_S
            ) from error
        finally:
            if connection is not None:
                connection.close()

    async def _answer(
        self, socket: str, request: h11.Request, body: bytes
    ) -> tuple[h11.Response, Connection]:
        while (idle := self._take_idle(socket)) is not None:
            # The server may close a connection at the moment at which it is used again.
            with suppress(OSError, h11.ProtocolError):
                return await self._ask_or_close(idle, request, body), idle
        new = Connection(*await asyncio.open_unix_connection(socket))
        return await self._ask_or_close(new, request, body), new

    async def _ask_or_close(
        self, connection: Connection, request: h11.Request, body: bytes
    ) -> h11.Response:
        try:
            return await connection.ask(request, body)
        except BaseException:
            connection.close()
            raise

    def _take_idle(self, socket: str) -> Connection | None:
        idle = self._idle.get(socket, [])
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
            connection.close()
        return None

    def _keep(self, socket: str, connection: Connection) -> None:
        idle = self._idle.setdefault(socket, [])
        for each in [each for each in idle if not each.is_open]:
            idle.remove(each)
            each.close()
        if connection.end_request() and len(idle) < MAX_IDLE:
            idle.append(connection)
        else:
            connection.close()


async def _send_back(response: h11.Response, answer: Connection, scope: Scope, send: Send) -> None:
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
        APIError: The handshake is not valid (400, 426), the server does not accept it, or it has ended (503).
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
        except InvalidStatus as error:
            problem = f"the model {child.model.name} accepts no WebSocket here: {error}"
            raise APIError(error.response.status_code, problem) from error
        except OSError as error:
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
    """Return the headers of a client's request without blanks around values, and with a host, which HTTP/1.0 omits."""
    headers = [(k, v.strip()) for k, v in scope["headers"] if k not in _NOT_SENT]
    if not any(name == b"host" for name, _ in headers):
        headers.append((b"host", b"localhost"))
    return [*headers, (b"x-request-id", scope["state"]["request_id"].encode())]


def _target(scope: Scope) -> bytes:
    path: bytes = scope["raw_path"].removeprefix(scope["root_path"].encode()) or b"/"
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path
