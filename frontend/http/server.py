"""uvicorn's server on a socket that is already open, with the limits of `Connection`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import uvicorn

from ...protocol.heartbeat import seconds_to_beat
from .connection import Connection
from .descriptors import DescriptorReserve

DATE_INTERVAL_S: Final = 1.0


class HTTPServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: the frontend decides when to stop."""

    def __init__(self, config: uvicorn.Config, slow_client_s: float) -> None:
        super().__init__(config)
        self._slow_client_s = slow_client_s
        self._exit_requested = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """True if no connection is open."""
        return not self.server_state.connections

    def stop_accepting(self) -> None:
        """Stop accepting connections. Open connections may send one more request, and close when they are idle."""
        for server in self.servers:
            server.close()
        for connection in self.server_state.connections:
            if isinstance(connection, Connection):
                connection.end_after_response()

    def exit(self) -> None:
        """Let `serve` end."""
        self.should_exit = True
        self._exit_requested.set()

    async def main_loop(self) -> None:
        """Update the header `Date` each second until `exit`. uvicorn's own loop wakes up ten times as often."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                wait_s = seconds_to_beat(DATE_INTERVAL_S)
                await asyncio.wait_for(self._exit_requested.wait(), wait_s)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers unchanged."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on `sockets`. A TLS handshake has the same time limit as a request."""
        new_connection = partial(
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
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(new_connection, sock=listener, **options)
            for listener in sockets or []
        ]
        self.started = True
