"""The frontends' client of the store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import msgspec
import zmq

from ...protocol.config import EngineConfig
from ...protocol.errors import EngineError
from ...protocol.store.messages import (
    DeleteChildren,
    DeleteObject,
    FromStore,
    GetObject,
    ListObjects,
    ObjectReply,
    PutObject,
    StateChanged,
    StoreCall,
    StoredObject,
    StoreHello,
    StoreState,
)
from ...protocol.transport import Peer
from ..client.replicas.async_peer import AsyncPeer

Reply = TypeVar("Reply")
Order = Literal["asc", "desc"]

REPLY_S: Final = 10.0
"""Maximum seconds that a caller waits for the store, which is restarted if it crashed."""

MAX_OBJECT_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of an object. A larger one would make all others wait."""

MAX_PENDING_BYTES: Final = 256 * 1024 * 1024
"""Maximum size of all objects that wait for the store."""

RETRY_S: Final = 2.0
"""Seconds after which a client may retry, in which a crashed store is usually restarted."""


class StoreError(EngineError):
    """The store did not do what it was asked for; the message says why. It may do so in `RETRY_S` seconds."""


class UnknownObject(EngineError):
    """The object after which a page was to begin does not exist."""


class Page(NamedTuple):
    """Some objects in the order of a list. `has_more` says that others follow."""

    objects: list[StoredObject]
    has_more: bool


class _Pending(NamedTuple):
    call: StoreCall
    size: int
    reply: asyncio.Future[Any]


class StoreClient:
    """One frontend's connection to the store.

    Calls that were not answered when the store crashed are sent again to the next one, so each is applied at least
    once. All methods must be called on the event loop that ran `start`.

    Every object has an `owner`, the one who may see it; `scope["state"]["owner"]` is that of a request. An object with
    another owner does not exist for the caller.

    Attributes:
        state: The last state that the store has reported.
    """

    def __init__(self, config: EngineConfig, client_index: int) -> None:
        self.state = StoreState()
        self._address = config.store_address()
        self._identity = b"frontend%d" % client_index
        self._context: zmq.Context[Any] = zmq.Context()
        self._peer: AsyncPeer[FromStore] | None = None
        self._wire: Peer[FromStore] | None = None
        self._connected = asyncio.Event()
        self._num_calls = 0
        self._pending: dict[int, _Pending] = {}
        self._pending_bytes = 0

    def start(self) -> None:
        """Connect to the store."""
        self._wire = Peer[FromStore](self._context, self._address, self._identity, FromStore)
        self._peer = AsyncPeer[FromStore](self._wire, self._receive)

    async def wait_until_connected(self, timeout_s: float) -> bool:
        """Return whether the store has answered within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        return self._connected.is_set()

    @property
    def num_dropped_frames(self) -> int:
        """The number of invalid frames from the store."""
        return 0 if self._wire is None else self._wire.num_dropped_frames

    async def put(
        self, kind: str, object_id: str, data: bytes, *, owner: str, parent: str = ""
    ) -> None:
        """Store an object, or replace the one with this kind, ID and owner. Return when it is durable.

        Raises:
            StoreError: It is too large, or the store cannot write.
        """
        await self._call(
            lambda call_id: PutObject(call_id, kind, object_id, owner, data, parent), len(data)
        )

    async def get(self, kind: str, object_id: str, *, owner: str) -> StoredObject | None:
        """Return an object; None if it does not exist.

        Raises:
            StoreError: The store does not answer.
        """
        reply = await self._call(lambda call_id: GetObject(call_id, kind, object_id, owner))
        return reply.objects[0] if reply.objects else None

    async def delete(self, kind: str, object_id: str, *, owner: str) -> bool:
        """Delete an object. Return whether it existed.

        Raises:
            StoreError: The store cannot write.
        """
        reply = await self._call(lambda call_id: DeleteObject(call_id, kind, object_id, owner))
        return reply.num_deleted > 0

    async def delete_children(self, kind: str, parent: str, *, owner: str) -> int:
        """Delete all objects with a kind and a parent. Return their number.

        Raises:
            StoreError: The store cannot write.
        """
        reply = await self._call(lambda call_id: DeleteChildren(call_id, kind, parent, owner))
        return reply.num_deleted

    async def list(
        self,
        kind: str,
        *,
        owner: str,
        parent: str | None = None,
        after: str = "",
        limit: int = 20,
        order: Order = "asc",
    ) -> Page:
        """Return a page of objects of one kind, by default the oldest of all parents.

        A page has at most 32 MiB of data, so it may be shorter than `limit`.

        Raises:
            StoreError: The store does not answer.
            UnknownObject: There is no object `after`.
        """
        is_descending = order == "desc"
        reply = await self._call(
            lambda call_id: ListObjects(call_id, kind, owner, parent, after, limit, is_descending)
        )
        if reply.is_unknown:
            raise UnknownObject(f"there is no object {after} to continue after")
        return Page(reply.objects, reply.has_more)

    def close(self) -> None:
        """Close the connection. Calls without a reply fail."""
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(StoreError("the server is shutting down"))
        if self._peer is not None:
            self._peer.close()
        self._context.term()

    async def _call(self, make_call: Callable[[int], StoreCall], size: int = 0) -> ObjectReply:
        """Send a call, again if the store crashes, and return its reply.

        Raises:
            StoreError: The store refused the call, did not answer in `REPLY_S`, or has too much to do.
        """
        if size > MAX_OBJECT_BYTES:
            raise StoreError(
                f"an object of {size} bytes is too large to be stored; at most {MAX_OBJECT_BYTES} are possible"
            )
        if self._pending_bytes + size > MAX_PENDING_BYTES:
            raise StoreError("the store is busy")
        self._num_calls += 1
        call_id = self._num_calls
        call = make_call(call_id)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = _Pending(call, size, future)
        self._pending_bytes += size
        try:
            if self._connected.is_set():
                self._send(call)
            async with asyncio.timeout(REPLY_S):
                reply = cast(ObjectReply, await future)
        except TimeoutError:
            raise StoreError("the store does not answer") from None
        finally:
            del self._pending[call_id]
            self._pending_bytes -= size
        if reply.error:
            raise StoreError(reply.error)
        return reply

    def _send(self, message: msgspec.Struct) -> None:
        assert self._peer is not None
        self._peer.send(message)

    def _receive(self, message: FromStore) -> None:
        match message:
            case StoreHello():
                self.state = message.state
                self._connected.set()
                for pending in list(self._pending.values()):
                    self._send(pending.call)
            case StateChanged():
                self.state = message.state
            case ObjectReply():
                pending_call = self._pending.get(message.call_id)
                if pending_call is not None and not pending_call.reply.done():
                    pending_call.reply.set_result(message)
