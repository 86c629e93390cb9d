"""Fetch blocks from the workers of other replicas."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ...protocol.arrays import int32_view
from ...protocol.kv_transfer.direct import (
    MAX_KEYS,
    BlockFetched,
    BlocksRead,
    DirectFetch,
    FetchBlocks,
    FetchEnded,
    StagedBlock,
)
from ...protocol.transport import UNREADABLE

if TYPE_CHECKING:
    from .block_format import BlockFormat
    from .block_memory import Fence
    from .block_regions import PeerRank
    from .nixl_staging import NixlStaging

logger = logging.getLogger(__name__)

MAX_REQUESTED: Final = 32
"""Maximum number of blocks per transfer that are requested and have not arrived."""

KEYS_PER_MESSAGE: Final = 8
assert KEYS_PER_MESSAGE <= MAX_KEYS

CONNECT_S: Final = 5.0
"""Seconds after which a connection to a peer that does not answer is closed."""

MAX_CONNECTIONS: Final = 64

_HEARTBEAT_MS: Final = 2000

_LOST: Final = (
    zmq.Event.DISCONNECTED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
)
"""Socket events after which a connection is closed. A peer that restarts has lost all blocks."""

_decode = msgspec.msgpack.Decoder(BlockFetched).decode
_encode = msgspec.msgpack.Encoder().encode


class JointTransfer:
    """A fetch from several workers, each of which has a part of every block.

    Attributes:
        num_left: The number of transfers in progress.
        missing: The blocks of which a part could not be fetched.
    """

    def __init__(self, num_transfers: int) -> None:
        self.num_left = num_transfers
        self.missing: set[int] = set()


class Transfer:
    """A fetch in progress.

    Attributes:
        missing: The block numbers that have not arrived, by their position in the fetch.
        source: The rank of which parts of blocks are fetched; None to fetch whole blocks.
        joint: The fetch that this transfer is a part of.
    """

    def __init__(
        self,
        fetch: DirectFetch,
        generation: int,
        fence: Fence,
        source: PeerRank | None = None,
        joint: JointTransfer | None = None,
    ) -> None:
        self.source, self.joint = source, joint
        self.transfer_id = fetch.transfer_id
        self.name, self.epoch = fetch.source.name, fetch.source.epoch
        self.generation = generation
        self.fence = fence
        self.keys = fetch.keys
        self.missing = dict(enumerate(int32_view(fetch.block_ids).tolist()))
        self.num_requested = 0
        self.last_progress = time.monotonic()

    @property
    def num_awaited(self) -> int:
        """Number of blocks that were requested and have not arrived."""
        return self.num_requested - (len(self.keys) - len(self.missing))


Write = Callable[[Transfer, int, memoryview], None]
"""A function that writes the bytes of the received block at a position of a transfer to the KV cache."""

Secure = Callable[["zmq.Socket[bytes]", str], None]
"""A function that prepares a socket for a connection to an address."""

End = Callable[[Transfer], None]
"""A function that reports the end of a transfer. Its `missing` blocks could not be fetched."""


class _Connection:
    """A connection to a peer, with the transfers from it."""

    def __init__(self, context: zmq.Context[Any], address: str, secure: Secure) -> None:
        self.address = address
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 1000), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            socket.set(option, value)
        socket.set(zmq.IPV6, int("[" in address))
        # A machine that vanishes does not close its connections, so use keepalives.
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
        secure(socket, address)
        self.socket = socket
        self.monitor: Any = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | _LOST)
        socket.connect(address)
        self.is_connected = False
        self.since = time.monotonic()
        self.numbers = itertools.count()
        self.requests: dict[int, tuple[Transfer, int]] = {}
        """For each request number, the transfer and the position of its first key."""
        self.transfers: dict[int, Transfer] = {}

    def close(self) -> None:
        """Close the sockets."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()


class BlockClient:
    """Fetches blocks over connections that it opens when needed. All methods must be called by one thread.

    A transfer ends as soon as the peer does not have one of its blocks, or the connection is lost.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        format: BlockFormat,
        secure: Secure,
        write: Write,
        end: End,
        patience_s: float,
        staging: NixlStaging | None = None,
    ) -> None:
        self._context = context
        self._format = format
        self._refused: dict[str, str] = {}
        """The last refusals, by address."""
        self._secure = secure
        self._write = write
        self._end = end
        self._patience_s = patience_s
        self._staging = staging
        self._connections: dict[str, _Connection] = {}

    @property
    def sockets(self) -> list[Any]:
        """The sockets to poll."""
        return [
            socket for each in self._connections.values() for socket in (each.socket, each.monitor)
        ]

    @property
    def is_busy(self) -> bool:
        """True if a transfer is in progress."""
        return any(each.transfers for each in self._connections.values())

    def fetch(self, address: str, transfer: Transfer) -> None:
        """Start a transfer from the worker at `address`."""
        connection = self._connections.pop(address, None)
        if connection is None:
            self._close_idle()
            connection = _Connection(self._context, address, self._secure)
        self._connections[address] = connection
        connection.transfers[id(transfer)] = transfer
        if transfer.missing:
            self._request(connection, transfer)
        else:
            self._finish(connection, transfer)

    def _request(self, connection: _Connection, transfer: Transfer) -> None:
        """Request more blocks of a transfer, up to the maximum number of pending blocks."""
        while (
            transfer.num_requested < len(transfer.keys)
            and transfer.num_awaited <= MAX_REQUESTED - KEYS_PER_MESSAGE
        ):
            first = transfer.num_requested
            keys = transfer.keys[first : first + KEYS_PER_MESSAGE]
            number = next(connection.numbers)
            connection.requests[number] = transfer, first
            fingerprint, rank, size = self._format.describe_reader(transfer.source)
            message = FetchBlocks(
                number,
                transfer.name,
                fingerprint,
                keys,
                self._staging is not None,
                transfer.epoch,
                self._format.block_size,
                rank,
                size,
            )
            connection.socket.send(_encode(message))
            transfer.num_requested += len(keys)

    def receive(self, socket: Any) -> None:
        """Receive messages from a socket that is readable."""
        for connection in list(self._connections.values()):
            if socket is connection.socket:
                self._receive_block(connection)
            elif socket is connection.monitor:
                event = recv_monitor_message(socket)["event"]
                if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                    connection.is_connected = True
                elif event & _LOST:
                    self._lose(connection)

    def _receive_block(self, connection: _Connection) -> None:
        head, *data = connection.socket.recv_multipart(copy=False)
        try:
            answer = _decode(head.buffer)
        except UNREADABLE:
            return
        transfer, first = connection.requests.get(answer.number, (None, 0))
        position = first + answer.index
        if transfer is None or position not in transfer.missing:
            if answer.staged is not None:
                connection.socket.send(_encode(BlocksRead([answer.staged.ticket])))
            return
        transfer.last_progress = time.monotonic()
        if not (answer.is_found and len(data) == 1):
            if answer.refusal:
                self._log_refusal(connection.address, answer.refusal)
            self._finish(connection, transfer)
        elif answer.staged is None:
            self._store(connection, transfer, position, data[0].buffer)
        elif self._staging is not None:
            arrived = partial(self._end_read, connection, transfer, position, answer.staged)
            self._staging.read(data[0].bytes, answer.staged, arrived)

    def _log_refusal(self, address: str, refusal: str) -> None:
        """Log a refusal, once for each peer and reason."""
        if self._refused.get(address) == refusal:
            return
        if len(self._refused) >= MAX_CONNECTIONS:
            del self._refused[next(iter(self._refused))]
        self._refused[address] = refusal
        logger.warning("no KV-cache blocks can be fetched from %s: %s", address, refusal)

    def _end_read(
        self,
        connection: _Connection,
        transfer: Transfer,
        position: int,
        staged: StagedBlock,
        data: memoryview | None,
    ) -> None:
        """Store a block that was read from the memory of a peer, unless it is no longer needed."""
        if self._connections.get(connection.address) is not connection:
            return
        connection.socket.send(_encode(BlocksRead([staged.ticket])))
        if id(transfer) not in connection.transfers or position not in transfer.missing:
            return
        transfer.last_progress = time.monotonic()
        if data is None:
            self._finish(connection, transfer)
        else:
            self._store(connection, transfer, position, data)

    def _store(
        self, connection: _Connection, transfer: Transfer, position: int, data: memoryview
    ) -> None:
        """Write a block to the KV cache, and request the next ones."""
        self._write(transfer, position, data)
        del transfer.missing[position]
        if transfer.missing:
            self._request(connection, transfer)
        else:
            self._finish(connection, transfer)

    def _finish(self, connection: _Connection, transfer: Transfer) -> None:
        """End a transfer and notify the peer."""
        del connection.transfers[id(transfer)]
        connection.requests = {
            number: request
            for number, request in connection.requests.items()
            if request[0] is not transfer
        }
        _, _, num_ranks = self._format.describe_reader(transfer.source)
        connection.socket.send(_encode(FetchEnded(transfer.name, max(num_ranks, 1))))
        self._end(transfer)

    def _lose(self, connection: _Connection) -> None:
        """End all transfers of a lost connection."""
        del self._connections[connection.address]
        connection.close()
        for transfer in connection.transfers.values():
            self._end(transfer)

    def _close_idle(self) -> None:
        """If there are too many connections, close the one that has been unused for the longest time."""
        if len(self._connections) >= MAX_CONNECTIONS:
            for connection in list(self._connections.values()):
                if not connection.transfers:
                    self._lose(connection)
                    return

    def give_up_late(self) -> None:
        """End the transfers that have made no progress for too long."""
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if not connection.is_connected and now - connection.since > CONNECT_S:
                self._lose(connection)
                continue
            for transfer in list(connection.transfers.values()):
                if now - transfer.last_progress > self._patience_s:
                    self._finish(connection, transfer)

    def fail_all(self) -> None:
        """End all transfers after an unexpected error."""
        for connection in list(self._connections.values()):
            self._lose(connection)

    def reset(self) -> None:
        """Discard all transfers, because no request waits for them anymore."""
        for connection in self._connections.values():
            for transfer in list(connection.transfers.values()):
                self._finish(connection, transfer)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
