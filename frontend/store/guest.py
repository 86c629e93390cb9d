"""The store of an engine while another engine has the file: it forwards all messages to that one's store."""

from __future__ import annotations

from typing import Any, Final

import zmq

from ...protocol.store.messages import FromStore, ToStore
from ...protocol.transport import Hub, Peer
from .file_lock import Holder

TURN_MESSAGES: Final = 256
"""Maximum number of messages that are forwarded in each direction in one turn."""


class Guest:
    """Forwards what frontends send to the store of another engine, and its replies.

    Every frontend has a connection of its own, so the other store sees each of them come and go.

    Args:
        hub: The socket for the frontends of this engine.
        context: For the connections to the other store.
        poller: Where the connections are registered.
        name: What distinguishes the frontends of this engine from those of the other one.
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
        """Forward to this store from now on."""
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
        """Close all connections, and return the frontends that had one."""
        identities = list(self._peers)
        for identity in identities:
            self._disconnect(identity)
        return identities

    def _connect(self, identity: bytes) -> None:
        """Open a connection for a frontend. The other store greets it, and the greeting is forwarded."""
        self._disconnect(identity)
        name = b"%b:%b" % (self._name.encode(), identity)
        peer = Peer[FromStore](self._context, self._holder.address, name, FromStore)
        self._peers[identity] = peer
        self._poller.register(peer.socket, zmq.POLLIN)

    def _disconnect(self, identity: bytes) -> None:
        if (peer := self._peers.pop(identity, None)) is not None:
            self._poller.unregister(peer.socket)
            peer.close()
