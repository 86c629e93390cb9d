"""The frontends' client of the store process: stored objects, recorded requests, idempotency keys and duties."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

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
from ...protocol.store.requests import (
    AttachRequest,
    ClaimedRequest,
    ClaimReply,
    ClaimRequests,
    DetachRequest,
    DutyReply,
    KeyReply,
    LeaveDuty,
    Logged,
    ReadersChanged,
    ReleaseKey,
    RequestState,
    RequestUpdate,
    ReserveKey,
    SessionOpened,
    StreamUpdate,
    TakeDuty,
)
from ...protocol.transport import Peer
from ..client.replicas.async_peer import AsyncPeer
from .journal import Journal, journal_path
from .token_log import TokenLog

Order = Literal["asc", "desc"]

REPLY_S: Final = 10.0
"""Maximum seconds that a caller waits for the store, which is restarted if it crashes."""

MAX_OBJECT_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of an object. A larger one would delay all others."""

MAX_PENDING_BYTES: Final = 256 * 1024 * 1024
"""Maximum total bytes of objects that wait for the store."""

RETRY_S: Final = 2.0
"""Seconds after which a client may retry. A crashed store is usually restarted in less."""


class StoreError(EngineError):
    """Raised if the store refused or did not answer a call; the message is the reason.

    A retry after `RETRY_S` may succeed.
    """


class UnknownObject(EngineError):
    """Raised if the object after which a page should begin does not exist."""


class Page(NamedTuple):
    """A page of a list of objects. `has_more` is true if more objects follow."""

    objects: list[StoredObject]
    has_more: bool


class _Pending(NamedTuple):
    call: StoreCall
    size: int
    reply: asyncio.Future[Any]


class Attachment:
    """A client's view of a request that it reads through the store.

    `on_update` receives all of the request's tokens from the first one on. After a crash of the store it receives them
    again. `record` is the recorded description of the request.
    """

    def __init__(
        self, client: StoreClient, call: AttachRequest, on_update: Callable[[RequestUpdate], None]
    ) -> None:
        self._client = client
        self.call = call
        self.on_update = on_update
        self.record = b""

    def close(self) -> None:
        """Stop receiving tokens of the request."""
        self._client.detach(self)


class StoreClient:
    """One frontend's connection to the store.

    Calls that were not answered when the store crashed are sent again to the next one, so each is applied at least
    once. All methods must be called on the event loop that ran `start`.

    Every object has an `owner`, which is the API key's identity in `scope["state"]["owner"]`. Objects of other owners
    appear not to exist.

    Attributes:
        state: The last state that the store has reported.
        log: Records the requests of this frontend.
        on_orphans: Called when the store has requests whose frontend has exited.
        on_objects: Called when the number of objects has changed.
    """

    def __init__(
        self, config: EngineConfig, client_index: int, context: zmq.Context[Any] | None = None
    ) -> None:
        self.state = StoreState()
        self._address = config.store_address()
        self._identity = b"frontend%d" % client_index
        self._context: zmq.Context[Any] = context or zmq.Context.instance()
        self._peer: AsyncPeer[FromStore] | None = None
        self._wire: Peer[FromStore] | None = None
        self._connected = asyncio.Event()
        self._num_calls = 0
        self._pending: dict[int, _Pending] = {}
        self._pending_bytes = 0
        self._attachments: dict[int, Attachment] = {}
        self.on_orphans: Callable[[], None] = lambda: None
        self.on_objects: Callable[[], None] = lambda: None
        holds = config.store.path is not None
        self.log = TokenLog(
            self._send,
            config.run_dir,
            client_index,
            lambda session: Journal(journal_path(config, session)),
            holds=holds,
        )

    def start(self) -> None:
        """Connect to the store."""
        self._wire = Peer[FromStore](self._context, self._address, self._identity, FromStore)
        self._peer = AsyncPeer[FromStore](self._wire, self._receive)

    def resume(self) -> None:
        """Receive although a callback that should have done it has failed."""
        if self._peer is not None:
            self._peer.resume()

    async def wait_until_connected(self, timeout_s: float) -> bool:
        """Wait until the store has answered. Return False if it has not done so within `timeout_s` seconds."""
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
        """Store an object, or replace the object with this kind, ID and owner. Return when it is durable.

        Raises:
            StoreError: The object is too large, or the store cannot write.
        """
        await self._call(
            lambda call_id: PutObject(call_id, kind, object_id, owner, data, parent), len(data)
        )

    async def get(self, kind: str, object_id: str, *, owner: str) -> StoredObject | None:
        """Return an object; None if it does not exist. Raise StoreError if the store does not answer."""
        reply: ObjectReply = await self._call(
            lambda call_id: GetObject(call_id, kind, object_id, owner)
        )
        return reply.objects[0] if reply.objects else None

    async def delete(self, kind: str, object_id: str, *, owner: str) -> bool:
        """Delete an object. Return whether it existed. Raise StoreError if the store cannot write."""
        reply: ObjectReply = await self._call(
            lambda call_id: DeleteObject(call_id, kind, object_id, owner)
        )
        return reply.num_deleted > 0

    async def delete_children(self, kind: str, parent: str, *, owner: str) -> int:
        """Delete all objects of one kind with the same parent. Return their number.

        Raises:
            StoreError: The store cannot write.
        """
        reply: ObjectReply = await self._call(
            lambda call_id: DeleteChildren(call_id, kind, parent, owner)
        )
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
        """Return a page of objects of one kind, oldest first by default, and of any parent if `parent` is None.

        A page has at most 32 MiB of data, so it may have fewer than `limit` objects.

        Raises:
            StoreError: The store does not answer.
            UnknownObject: The object `after` does not exist.
        """
        is_descending = order == "desc"
        reply: ObjectReply = await self._call(
            lambda call_id: ListObjects(call_id, kind, owner, parent, after, limit, is_descending)
        )
        if reply.is_unknown:
            raise UnknownObject(
                f"the object {after}, after which the list should continue, does not exist"
            )
        return Page(reply.objects, reply.has_more)

    async def attach(
        self, request_id: str, owner: str, on_update: Callable[[RequestUpdate], None]
    ) -> Attachment | None:
        """Start to read a recorded request. `on_update` receives its tokens until it ends.

        Return None if it does not exist.

        Raises:
            StoreError: The store does not answer.
        """
        attached: list[Attachment] = []

        def make_call(call_id: int) -> AttachRequest:
            call = AttachRequest(call_id, request_id, owner)
            attached.append(Attachment(self, call, on_update))
            self._attachments[call_id] = attached[0]
            return call

        try:
            reply: RequestState = await self._call(make_call)
        except BaseException:
            for attachment in attached:
                attachment.close()
            raise
        [attachment] = attached
        if not reply.record:
            attachment.close()
            return None
        attachment.record = reply.record
        return attachment

    async def is_unfinished(self, request_id: str, owner: str) -> bool:
        """Return whether a request is recorded and has not ended. Raise StoreError if the store does not answer."""
        has_ended: list[bool] = []

        def look(update: RequestUpdate) -> None:
            has_ended[:] = [stream.end is not None for stream in update.streams]

        attachment = await self.attach(request_id, owner, look)
        if attachment is None:
            return False
        attachment.close()
        return not all(has_ended)

    def detach(self, attachment: Attachment) -> None:
        """Stop reading a request through the store."""
        if self._attachments.pop(attachment.call.call_id, None) is not None:
            self._send(DetachRequest(attachment.call.call_id))

    async def reserve_key(self, owner: str, key: str) -> KeyReply:
        """Return the request that was begun with an idempotency key.

        If there is none, reserve the key for a new request.

        Raises:
            StoreError: The store does not answer.
        """
        reply: KeyReply = await self._call(lambda call_id: ReserveKey(call_id, owner, key))
        return reply

    async def find_key(self, owner: str, key: str) -> str:
        """Return the ID of the request that was begun with a key; "" if there is none.

        Raises:
            StoreError: The store does not answer.
        """
        reply: KeyReply = await self._call(lambda call_id: ReserveKey(call_id, owner, key, True))
        return reply.request_id

    def release_key(self, owner: str, key: str) -> None:
        """Release a key, so that another request can use it. A request that began with it goes on without it."""
        self._send(ReleaseKey(owner, key))

    async def take_duty(self, name: str) -> bool:
        """Try to take a duty, such as running batches. Return whether this frontend has it.

        At any time, at most one frontend of all engines that share the store has a duty.

        Raises:
            StoreError: The store does not answer.
        """
        reply: DutyReply = await self._call(lambda call_id: TakeDuty(call_id, name))
        return reply.has_it

    def leave_duty(self, name: str) -> None:
        """Release a duty, so that another frontend can take it."""
        self._send(LeaveDuty(name))

    async def claim(self, limit: int) -> Sequence[ClaimedRequest]:
        """Take over up to `limit` requests whose frontend has exited. Raise StoreError if the store does not answer."""
        reply: ClaimReply = await self._call(lambda call_id: ClaimRequests(call_id, limit))
        return reply.requests

    def close(self) -> None:
        """Close the connection. Calls without a reply fail."""
        self.log.close()
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(StoreError("the server is shutting down"))
        if self._peer is not None:
            self._peer.close()

    async def _call(self, make_call: Callable[[int], StoreCall], size: int = 0) -> Any:
        """Send a call and return its reply. If the store crashes meanwhile, send the call again.

        Raises:
            StoreError: The store refused the call, did not answer in `REPLY_S` seconds, or has too many pending calls.
        """
        if size > MAX_OBJECT_BYTES:
            raise StoreError(
                f"an object of {size} bytes is too large to be stored; the maximum is "
                f"{MAX_OBJECT_BYTES} bytes"
            )
        if self._pending_bytes + size > MAX_PENDING_BYTES:
            raise StoreError("the store is busy; retry later")
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
                reply = await future
        except TimeoutError:
            raise StoreError("the store does not respond; retry later") from None
        finally:
            del self._pending[call_id]
            self._pending_bytes -= size
        if reply.error:
            raise StoreError(reply.error)
        return reply

    def _send(self, message: msgspec.Struct) -> None:
        if self._peer is not None:
            self._peer.send(message)

    def _receive(self, message: FromStore) -> None:
        match message:
            case StoreHello():
                self._set_state(message.state)
                self.log.greet()
            case SessionOpened():
                self.log.record_opened(message.last_number)
                self._connected.set()
                self._send_again()
            case Logged():
                self.log.acknowledge(message.number)
            case StateChanged():
                self._set_state(message.state)
            case RequestUpdate():
                if (attachment := self._attachments.get(message.call_id)) is not None:
                    attachment.on_update(message)
            case ReadersChanged():
                self.log.set_num_readers(message.request_id, message.owner, message.num_readers)
            case ObjectReply() | RequestState() | KeyReply() | ClaimReply() | DutyReply():
                self._receive_reply(message)

    def _receive_reply(
        self, reply: ObjectReply | RequestState | KeyReply | ClaimReply | DutyReply
    ) -> None:
        pending = self._pending.get(reply.call_id)
        if pending is not None and not pending.reply.done():
            pending.reply.set_result(reply)
        if isinstance(reply, RequestState) and reply.call_id in self._attachments:
            # The reply has all tokens so far, and must be applied before later updates. If the store restarted, this
            # is a second reply to the same call.
            states = enumerate(reply.streams)
            updates = [
                StreamUpdate(
                    position, 0, each.tokens, each.end, each.logprobs, each.prompt_logprobs
                )
                for position, each in states
            ]
            is_gone = not reply.record
            self._attachments[reply.call_id].on_update(
                RequestUpdate(reply.call_id, updates, is_gone)
            )

    def _send_again(self) -> None:
        """Send again everything that the store may not have received, or has lost in a restart."""
        for pending in list(self._pending.values()):
            self._send(pending.call)
        for call_id, attachment in self._attachments.items():
            if call_id not in self._pending:
                self._send(attachment.call)

    def _set_state(self, state: StoreState) -> None:
        before, self.state = self.state, state
        if state.num_orphans:
            self.on_orphans()
        if state.num_objects != before.num_objects:
            self.on_objects()
