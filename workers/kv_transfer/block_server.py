"""Send blocks to the workers of other replicas that request them."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import zmq

from ...protocol.kv_transfer.direct import (
    BlockFetched,
    BlocksRead,
    FetchBlocks,
    FetchEnded,
    FetchMessage,
)
from ...protocol.transport import UNREADABLE
from .block_format import BlockFormat
from .block_regions import PeerRank
from .offered_blocks import OfferedBlocks

if TYPE_CHECKING:
    from .nixl_staging import NixlStaging

MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_RECORDED: Final = 4096
"""Maximum number of remembered requests that have ended, or whose blocks were fetched before they ended."""
MAX_AWAITED: Final = 1 << 16
"""Maximum number of blocks for which all peers together may wait. Further ones are reported as missing."""

UNKNOWN_S: Final = 10.0
"""Seconds for which a peer waits for blocks of an unnamed epoch. They were computed before, so few steps follow."""

_decode = msgspec.msgpack.Decoder(FetchMessage).decode
_encode = msgspec.msgpack.Encoder().encode


class _Waiter(NamedTuple):
    """A peer that waits for a block: its identity, and the request that the answer belongs to."""

    socket: zmq.Socket[bytes]
    identity: bytes
    number: int
    position: int
    name: str
    takes_staged: bool
    since: float
    """The time of the request, of `time.monotonic`; infinity if the core of its epoch is still running."""
    reader: PeerRank | None
    """The rank that reads a part of the block; None if it reads the whole block."""


class BlockServer:
    """Sends the blocks of `offered` to peers. A block that is not complete is sent when `add_offered` announces it.

    All methods must be called by one thread, which polls the sockets.
    """

    def __init__(
        self, offered: OfferedBlocks, format: BlockFormat, staging: NixlStaging | None = None
    ) -> None:
        self._offered = offered
        self._format = format
        self._staging = staging
        self.sockets: list[zmq.Socket[bytes]] = []
        self.num_bytes_sent = 0
        self._waiting: dict[bytes, list[_Waiter]] = {}
        self._num_waiting = 0
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._fetched: OrderedDict[str, int] = OrderedDict()
        self._num_ends: OrderedDict[str, int] = OrderedDict()
        """The number of readers that have ended their fetch of a request, which others have not."""
        self._held: dict[str, int] = {}
        self._epoch = 0

    @property
    def has_waiting(self) -> bool:
        """True if a peer waits for a block."""
        return bool(self._waiting)

    def listen(self, context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
        """Return a socket that accepts connections once the caller has bound it to an address."""
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            socket.set(option, value)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.IPV6, int("[" in address))
        self.sockets.append(socket)
        return socket

    def receive(self, socket: zmq.Socket[bytes]) -> list[int]:
        """Answer the next message. Return the transfers whose blocks no longer have to be held."""
        identity, *frames = socket.recv_multipart()
        try:
            (frame,) = frames
            message = _decode(frame)
        except (ValueError, *UNREADABLE):
            return []
        if isinstance(message, FetchEnded):
            return self._end_fetch(message)
        if isinstance(message, BlocksRead):
            if self._staging is not None:
                self._staging.release(message.tickets)
            return []
        self._answer(socket, identity, message)
        return []

    def _answer(self, socket: zmq.Socket[bytes], identity: bytes, message: FetchBlocks) -> None:
        refusal = self._format.find_refusal(message)
        reader = PeerRank(message.tp_rank, message.tp_size) if message.tp_size else None
        is_over = message.name in self._ended or message.epoch not in (0, self._epoch)
        since = math.inf if message.epoch else time.monotonic()
        for index, key in enumerate(message.keys):
            waiter = _Waiter(
                socket,
                identity,
                message.number,
                index,
                message.name,
                message.takes_staged,
                since,
                reader,
            )
            if not refusal and self._send(waiter, key):
                continue
            if refusal or is_over or self._num_waiting >= MAX_AWAITED:
                self._send_missing(waiter, refusal)
            else:
                self._waiting.setdefault(key, []).append(waiter)
                self._num_waiting += 1

    def _send(self, waiter: _Waiter, key: bytes) -> bool:
        data = self._offered.read(key)
        if data is None:
            return False
        if waiter.reader is not None:
            data = self._format.part_of(key, data, waiter.reader)
        self.num_bytes_sent += len(data)
        staged = None
        if waiter.takes_staged and self._staging is not None and data:
            staged = self._staging.stage(data)
            if staged is not None:
                data = self._staging.metadata
        head = _encode(BlockFetched(waiter.number, waiter.position, True, staged))
        waiter.socket.send_multipart((waiter.identity, head, data), copy=False)
        return True

    def _send_missing(self, waiter: _Waiter, refusal: str = "") -> None:
        head = _encode(BlockFetched(waiter.number, waiter.position, False, refusal=refusal))
        waiter.socket.send_multipart((waiter.identity, head))

    def add_offered(self, keys: Iterable[bytes]) -> None:
        """Send newly offered blocks to the peers that wait for them."""
        if self._waiting:
            for key in keys:
                for waiter in self._waiting.pop(key, ()):
                    self._num_waiting -= 1
                    if not self._send(waiter, key):
                        self._send_missing(waiter)

    def end_requests(self, names: Sequence[str]) -> None:
        """Notify waiting peers that no more blocks of these requests follow."""
        for name in names:
            _record_name(self._ended, name)
        ended = set(names)
        self._end_waiting(lambda waiter: waiter.name in ended)

    def give_up_unknown(self) -> None:
        """Notify peers that have waited too long for requests which may have ended before their core started."""
        latest = time.monotonic() - UNKNOWN_S
        self._end_waiting(lambda waiter: waiter.since < latest)

    def _end_waiting(self, is_over: Callable[[_Waiter], bool]) -> None:
        for key, waiters in list(self._waiting.items()):
            left = []
            for waiter in waiters:
                if is_over(waiter):
                    self._num_waiting -= 1
                    self._send_missing(waiter)
                else:
                    left.append(waiter)
            if left:
                self._waiting[key] = left
            else:
                del self._waiting[key]

    def hold_requests(self, held: Iterable[tuple[str, int]]) -> list[int]:
        """Record transfers whose blocks are held until they are fetched. Return those that were fetched already."""
        done = []
        for name, transfer_id in held:
            if name in self._fetched:
                done.append(transfer_id)
            else:
                self._held[name] = transfer_id
        return done

    def expire(self, transfer_ids: Iterable[int]) -> None:
        """Remove transfers whose blocks are not held anymore."""
        gone = set(transfer_ids)
        self._held = {
            name: transfer_id for name, transfer_id in self._held.items() if transfer_id not in gone
        }

    def reset(self, epoch: int) -> None:
        """Remove all requests, because their core has exited. The next one has this epoch."""
        self._epoch = epoch
        for waiter in (waiter for waiters in self._waiting.values() for waiter in waiters):
            self._send_missing(waiter)
        self._waiting.clear()
        self._num_waiting = 0
        self._held.clear()

    def _end_fetch(self, message: FetchEnded) -> list[int]:
        name = message.name
        num_ends = self._num_ends.pop(name, 0) + 1
        if num_ends < message.num_readers:
            _record_name(self._num_ends, name, num_ends)
            return []
        transfer_id = self._held.pop(name, None)
        if transfer_id is not None:
            return [transfer_id]
        _record_name(self._fetched, name)
        return []


def _record_name(names: OrderedDict[str, int], name: str, count: int = 1) -> None:
    names[name] = count
    if len(names) > MAX_RECORDED:
        names.popitem(last=False)
