"""The store of an engine whose database is owned by another engine's store: forward all messages to that store."""

from __future__ import annotations

from typing import Any, Final

import zmq

from ...protocol.store.messages import FromStore, ToStore
from ...protocol.transport import Hub, Peer
from .file_lock import Holder

TURN_MESSAGES: Final = 256
"""Maximum number of messages that are forwarded in each direction in one turn."""


class Guest:
    """Forwards the frontends' messages to the store of another engine, and its replies to the frontends.

    Every frontend has its own connection, so that the other store notices when a frontend connects or exits.

    Args:
        hub: The socket for the frontends of this engine.
        context: The ZeroMQ context for the connections to the other store.
        poller: The poller with which the connections are registered.
        name: A prefix that distinguishes the frontends of this engine from the frontends of the other engine.
        holder: The other store.
    """

    def __init__(
        self,
        hub: Hub[ToStore],
        context: zmq.Context[Any],
        poller: zmq.Poller,
        name: str,
        holder: Holder,
    ) -> None:
        self._hub = hub
        self._context = context
        self._poller = poller
        self._name = name
        self._holder = holder
        self._peers: dict[bytes, Peer[FromStore]] = {}

    @property
    def num_dropped_frames(self) -> int:
        """The number of invalid frames from the other store."""
        return sum(peer.num_dropped_frames for peer in self._peers.values())

    def follow(self, holder: Holder) -> None:
        """Forward messages to the store `holder` from now on."""
        if holder != self._holder:
            self._holder = holder
            for identity in list(self._peers):
                self._connect(identity)

    def turn(self) -> None:
        """Forward the messages that have arrived."""
        for _ in range(TURN_MESSAGES):
            if (received := self._hub.receive()) is None:
                break
            identity, message = received
            if message is None:
                self._connect(identity)
            elif (peer := self._peers.get(identity)) is not None:
                peer.send(message)
        for identity, peer in self._peers.items():
            for _ in range(TURN_MESSAGES):
                if (reply := peer.receive()) is None:
                    break
                self._hub.send(identity, reply)

    def close(self) -> list[bytes]:
        """Close all connections, and return the frontends that had a connection."""
        identities = list(self._peers)
        for identity in identities:
            self._disconnect(identity)
        return identities

    def _connect(self, identity: bytes) -> None:
        """Open a connection for a frontend. The greeting of the other store will be forwarded to the frontend."""
        self._disconnect(identity)
        name = b"%b:%b" % (self._name.encode(), identity)
        peer = Peer[FromStore](self._context, self._holder.address, name, FromStore)
        self._peers[identity] = peer
        self._poller.register(peer.socket, zmq.POLLIN)

    def _disconnect(self, identity: bytes) -> None:
        if (peer := self._peers.pop(identity, None)) is not None:
            self._poller.unregister(peer.socket)
            peer.close()
