"""The server of HTTP: pauses of the machine, and failures to accept connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

import uvloop
from engine.frontend.http.connection import Connection
from engine.frontend.http.late_timers import LATE_S
from engine.frontend.http.server import Config, HTTPServer


class Suspension(asyncio.Protocol):
    """Stops the event loop, as when its process is suspended while it handles what it has read."""

    began = threading.Event()

    def data_received(self, data: bytes) -> None:
        self.began.set()
        # This is the suspension, not a wait: longer than the timeouts of the test by more than LATE_S.
        time.sleep(1.0 + 1.5 * LATE_S)


LARGE = bytes(1 << 20)
"""A body that is larger than the buffers of the kernel."""


async def answer_largely(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": LARGE})


def test_clients_are_not_slow_while_the_server_is_suspended() -> None:
    """A container may be paused for longer than clients may take."""
    config = Config(
        answer_largely, http=Connection, ws="none", lifespan="off", timeout_keep_alive=1
    )
    config.load()
    server = HTTPServer(config, slow_client_s=1.0)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)

    async def serve() -> None:
        await asyncio.get_running_loop().create_server(Suspension, sock=listeners[1])
        await server.serve(sockets=listeners[:1])

    serving = threading.Thread(target=lambda: uvloop.run(serve()))
    serving.start()

    def ask(connection: socket.socket) -> None:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")

    def read(connection: socket.socket, num_bytes: int) -> None:
        while num_bytes > 0:
            piece = connection.recv(65536)
            assert piece, "the server has closed the connection"
            num_bytes -= len(piece)

    with contextlib.ExitStack() as stack:
        stack.callback(serving.join)
        stack.callback(lambda: server.servers[0].get_loop().call_soon_threadsafe(server.exit))
        idle, unread, suspending = (
            stack.enter_context(socket.create_connection(listeners[index].getsockname(), 20))
            for index in (0, 0, 1)
        )
        ask(idle)
        read(idle, len(LARGE))
        ask(unread)
        read(unread, 1)
        suspending.sendall(b"now")
        assert Suspension.began.wait(20)
        ask(idle)
        read(unread, len(LARGE) - 65536)
        read(idle, len(LARGE))


def test_a_server_accepts_connections_after_a_failure_to_accept_one() -> None:
    """Uvloop closes the socket after some errors, and reads it no more after an exception of the protocol."""
    config = Config(answer_largely, http=Connection, ws="none", lifespan="off")
    config.load()
    server = HTTPServer(config, slow_client_s=20.0)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    failed = threading.Event()

    def fail_once(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is Connection.__init__.__code__:
            sys.setprofile(None)
            raise MemoryError

    async def serve() -> None:
        def recover(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            failed.set()
            server.listen_again()

        asyncio.get_running_loop().set_exception_handler(recover)
        sys.setprofile(fail_once)
        await server.serve(sockets=[listener])

    serving = threading.Thread(target=lambda: uvloop.run(serve()))
    serving.start()
    with contextlib.ExitStack() as stack:
        stack.callback(serving.join)
        stack.callback(lambda: server.servers[0].get_loop().call_soon_threadsafe(server.exit))
        stack.enter_context(socket.create_connection(address, 20))
        assert failed.wait(20)
        client = stack.enter_context(socket.create_connection(address, 20))
        client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"
