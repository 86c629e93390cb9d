"""Receive ZeroMQ messages of the engine on an asyncio event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from ....protocol.transport import Peer

In = TypeVar("In")


class AsyncPeer(Generic[In]):
    """A `Peer` on a running asyncio loop. It passes every received message to `on_message`.

    ZeroMQ's file descriptor is edge-triggered, and sending may consume the edge. So the socket is read until it is
    empty after each wake-up and after each send.
    """

    def __init__(self, peer: Peer[In], on_message: Callable[[In], None]) -> None:
        self._peer = peer
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._read_scheduled = False
        self._loop.add_reader(peer.socket.FD, self._read)
        self._schedule_read()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message."""
        self._peer.send(message)
        self._schedule_read()

    def close(self) -> None:
        """Close the socket."""
        self._loop.remove_reader(self._peer.socket.FD)
        self._peer.close()

    def resume(self) -> None:
        """Read although a callback that should have done it has failed."""
        self._read_scheduled = False
        self._schedule_read()

    def _schedule_read(self) -> None:
        if not self._read_scheduled:
            # In this order, a failure to schedule it is not remembered as a success.
            self._loop.call_soon(self._read)
            self._read_scheduled = True

    def _read(self) -> None:
        self._read_scheduled = False
        socket = self._peer.socket
        # The callback for a message may close the socket.
        while not socket.closed and (message := self._peer.receive()) is not None:
            self._on_message(message)
