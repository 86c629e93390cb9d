"""The store process of one engine. It owns the database, or is a guest of another engine's store that owns it."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import zmq

from ...protocol.config import FIRST_EPOCH, EngineConfig
from ...protocol.store.digest import message_digest
from ...protocol.store.messages import ToStore
from ...protocol.transport import Hub
from .database import Database
from .file_lock import FileLock, Holder
from .guest import Guest
from .held_connections import HeldConnections
from .server import StoreServer

GUEST_WAIT_MS: Final = 20
"""Milliseconds between attempts of a guest to acquire the lock."""


class EngineStore:
    """Serves the frontends of one engine.

    Two engines share a file during `engine upgrade`. One store holds the lock of the file. The other store is its
    guest, and forwards all messages to it until it gets the lock itself, because the first store exited. To a frontend
    this looks like a crash of its own store, so it sends unanswered calls again. A store becomes a guest only during an
    upgrade and if both have the same message formats; otherwise it waits for the lock.

    Raises:
        ConfigError: The database cannot be opened.
    """

    def __init__(self, config: EngineConfig, context: zmq.Context[Any]) -> None:
        self._config = config
        self._context = context
        self.poller = zmq.Poller()
        self._hub: Hub[ToStore] = Hub(context, config.store_address(), ToStore)
        self.poller.register(self._hub.socket, zmq.POLLIN)
        self._connections: HeldConnections | None = None
        if sys.platform == "linux":
            self._connections = HeldConnections(config.connections_path())
            self.poller.register(self._connections.fd, zmq.POLLIN)
        self._server: StoreServer | None = None
        self._guest: Guest | None = None
        self._lock: FileLock | None = None
        self._digest = ""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        config = self._config
        if config.store.path is None:
            self._serve(Database(None))
            return
        self._digest = message_digest()
        holder = Holder(os.getpid(), config.store_address(), self._digest)
        self._lock = FileLock(config.store.path, holder)
        may_share = config.takes_over or config.epoch != FIRST_EPOCH
        if self._lock.acquire(lambda: may_share and self._find_host() is not None):
            self._serve(Database(config.store.path, self._lock))
            return
        host = self._find_host()
        assert host is not None
        self._guest = Guest(self._hub, self._context, self.poller, config.run_dir, host)

    @property
    def num_dropped_frames(self) -> int:
        """The number of invalid frames."""
        guest = self._guest
        return self._hub.num_dropped_frames + (0 if guest is None else guest.num_dropped_frames)

    def wait(self) -> None:
        """Wait until a message arrives or a timer is due."""
        self.poller.poll(GUEST_WAIT_MS if self._server is None else self._server.wait_ms)

    def turn(self) -> None:
        """Apply or forward the messages that have arrived."""
        if self._connections is not None:
            self._connections.turn()
        if self._guest is not None:
            assert self._lock is not None
            if self._lock.try_acquire():
                self._take_over(self._guest, self._lock)
            else:
                if (host := self._find_host()) is not None:
                    self._guest.follow(host)
                self._guest.turn()
                return
        assert self._server is not None
        self._server.turn()

    def close(self) -> None:
        """Close the sockets and the database."""
        if self._guest is not None:
            self._guest.close()
        if self._server is not None:
            self._server.close()
        if self._lock is not None:
            self._lock.close()
        if self._connections is not None:
            self._connections.close()
        self._hub.close()

    def _serve(self, database: Database) -> None:
        self._server = StoreServer(self._config, self._hub, database)

    def _take_over(self, guest: Guest, lock: FileLock) -> None:
        identities = guest.close()
        self._guest = None
        self._serve(Database(self._config.store.path, lock))
        assert self._server is not None
        for identity in identities:
            self._server.greet(identity)

    def _find_host(self) -> Holder | None:
        """Return the store that holds the lock, if this store can be its guest."""
        assert self._lock is not None
        holder = self._lock.read_holder()
        # The process that holds the lock may not have written its description yet. Then this is the description of the
        # last holder.
        if holder is None or holder.address == self._config.store_address():
            return None
        return holder if holder.protocol == self._digest else None
