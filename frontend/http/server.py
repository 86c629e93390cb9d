"""uvicorn's server on a socket that is already open, with the limits of `Connection`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from functools import partial
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.server import Server, ServerState

from .connection import Connection
from .descriptors import DescriptorReserve

__all__ = ["Config", "HTTPServer"]

LISTEN_AGAIN_S: Final = 0.5
"""Seconds between attempts to accept connections again."""


class DatedState(ServerState):
    """uvicorn's state, which adds the header `Date` when a response needs it, so that no timer updates it."""

    _other_headers: list[tuple[bytes, bytes]]
    _dated_headers: list[tuple[bytes, bytes]]
    _second = 0

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of every response. They may be set without `Date`."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            date = formatdate(second, usegmt=True).encode()
            self._dated_headers = [(b"date", date), *self._other_headers]
        return self._dated_headers

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._other_headers, self._second = headers, 0


class HTTPServer(Server):
    """uvicorn's server without its signal handlers: the frontend decides when to stop."""

    def __init__(self, config: Config, slow_client_s: float) -> None:
        super().__init__(config)
        self.server_state = DatedState()
        self._slow_client_s = slow_client_s
        self._listeners: list[socket.socket] = []
        self._accepting: list[socket.socket] = []
        self._must_listen = False
        self._woken = asyncio.Event()
        self._has_started = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """True if no connection is open."""
        return not self.server_state.connections

    @property
    def is_answering(self) -> bool:
        """True if an accepted request is arriving, is not answered, or has an answer that is not sent completely."""
        return any(connection.is_answering for connection in self._connections)

    @property
    def _connections(self) -> list[Connection]:
        """The open connections. uvicorn also knows other classes of them, which this server does not use."""
        return [each for each in self.server_state.connections if isinstance(each, Connection)]

    def stop_accepting(self) -> None:
        """Stop accepting connections. Open connections may send one more request, and close when they are idle."""
        for server in self.servers:
            server.close()
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        for connection in self._connections:
            connection.end_after_response()

    def end_websockets(self) -> None:
        """Close every WebSocket when its current answer has ended."""
        for connection in self._connections:
            connection.end_websocket()

    def exit(self) -> None:
        """Make `serve` return."""
        self.should_exit = True
        self._woken.set()

    @property
    def is_deaf(self) -> bool:
        """True if the event loop has closed the socket on which connections arrive, as it does if accepting fails."""
        return bool(self._listeners) and any(each.fileno() < 0 for each in self._accepting)

    def listen_again(self) -> None:
        """Accept connections again after a failure. uvloop accepts no more after an error before it accepts one."""
        self._must_listen = True
        self._woken.set()

    async def main_loop(self) -> None:
        """Wait for `exit`. uvicorn's own loop wakes up ten times a second."""
        while not self.should_exit:
            self._woken.clear()
            while self._must_listen and not self.should_exit:
                self._must_listen = False
                for server in self.servers:
                    server.close()
                try:
                    await self._listen()
                except (MemoryError, OSError):
                    self._must_listen = True
                    await asyncio.sleep(LISTEN_AGAIN_S)
            await self._woken.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers unchanged."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on `sockets`. A TLS handshake has the same time limit as a request."""
        self.server_state.default_headers = self.config.encoded_headers
        new_connection = self._new_connection = partial(
            Connection,
            self._slow_client_s,
            DescriptorReserve(),
            config=self.config,
            server_state=self.server_state,
            app_state={},
        )
        options: dict[str, Any] = {"ssl": self.config.ssl, "backlog": self.config.backlog}
        if self.config.ssl is not None:
            options["ssl_handshake_timeout"] = self._slow_client_s
            options["ssl_shutdown_timeout"] = self._slow_client_s
        self._create_server = partial(
            asyncio.get_running_loop().create_server, new_connection, **options
        )
        self._listeners = list(sockets or [])
        await self._listen()
        self.started = True
        self._has_started.set()

    async def adopt(self, client: socket.socket, on_made: Callable[[Connection], None]) -> None:
        """Make an open TCP socket, which another process has accepted, a connection of this server, once it serves.

        `on_made` is called before anything is read from it.
        """
        await self._has_started.wait()
        connection = self._new_connection()
        connection.on_made = on_made
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, client)

    async def _listen(self) -> None:
        # Servers close their sockets, so they get copies.
        self._accepting = [listener.dup() for listener in self._listeners]
        self.servers = [await self._create_server(sock=each) for each in self._accepting]
