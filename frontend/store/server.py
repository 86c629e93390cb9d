"""The loop of the store process: apply messages in one transaction per turn, and reply after the commit."""

from __future__ import annotations

import functools
import math
import sqlite3
import time
from collections.abc import Callable
from itertools import chain
from typing import Final, TypeAlias, TypeVar, get_args

from ...protocol.config import EngineConfig
from ...protocol.store.messages import (
    FromStore,
    GetObject,
    ListObjects,
    ObjectCall,
    ObjectReply,
    PutObject,
    StateChanged,
    StoreHello,
    StoreState,
    ToStore,
)
from ...protocol.store.requests import (
    AttachRequest,
    BeginRequest,
    ClaimRequests,
    DetachRequest,
    KeyReply,
    LeaveDuty,
    LogEntry,
    Logged,
    OpenSession,
    ReadersChanged,
    ReleaseKey,
    RequestState,
    RequestUpdate,
    ReserveKey,
    SessionOpened,
    TakeDuty,
)
from ...protocol.transport import FrameTooLarge, Hub
from .database import Database
from .journal import journal_path
from .live_requests import ORPHAN, LiveRequest
from .objects import ROW_BYTES, Objects
from .requests import Requests

TURN_MESSAGES: Final = 256
"""Maximum number of messages that are applied in one transaction."""
TURN_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of the objects that are written in one transaction."""

EVICT_S: Final = 10.0
"""Seconds between searches for expired objects and requests."""

REPORT_S: Final = 1.0
"""Minimum seconds between reports of the store's size."""

LOW_WATER: Final = 0.9
"""Share of the maximum size to which a full store is emptied, so that it is not full again at once."""

SHARING_MS: Final = 100
"""Maximum milliseconds between turns while another engine shares this store, because it may exit at any time."""

VACUUM_PAGES: Final = 256
"""Number of free pages that are returned to the file system at once."""

Sent: TypeAlias = tuple[bytes, FromStore]
"""The identity of a frontend, and a message for it."""

Call = tuple[bytes, ObjectCall]

Message = TypeVar("Message")

_ENTRIES: Final = get_args(LogEntry)
_OBJECT_CALLS: Final = get_args(ObjectCall)


class StoreServer:
    """Applies the frontends' messages to the database, and replies to them.

    Args:
        config: The configuration of this engine.
        hub: The socket for the frontends.
        database: The database, which this closes.
    """

    def __init__(self, config: EngineConfig, hub: Hub[ToStore], database: Database) -> None:
        self._limits = config.store
        self._database = database
        self._objects = Objects(self._database)
        self._requests = Requests(
            self._database, config.run_dir, functools.partial(journal_path, config)
        )
        self._sessions: dict[bytes, bytes] = {}
        """Identity of a connected frontend -> its session."""
        self._attached: dict[tuple[bytes, int], LiveRequest] = {}
        self._num_evicted = 0
        self._evict_at = 0.0
        self._known = StoreState()
        self._report_at = 0.0
        self._look_at = 0.0
        self._peers: set[bytes] = set()
        self._hub = hub

    @property
    def wait_ms(self) -> int:
        """The maximum number of milliseconds until the next turn."""
        if self._requests.has_other_engines:
            return SHARING_MS
        has_changed = self._database.trouble or self._state() != self._known
        return int(1000 * (REPORT_S if has_changed else EVICT_S))

    def turn(self) -> None:
        """Apply the messages that have arrived, commit, and reply."""
        calls: list[Call] = []
        others: list[tuple[bytes, ToStore]] = []
        replies: list[Sent] = []
        logged: set[bytes] = set()
        num_messages = num_bytes = 0
        self._end_dead_engines()
        while num_messages < TURN_MESSAGES and num_bytes < TURN_BYTES:
            if (received := self._hub.receive()) is None:
                break
            num_messages += 1
            identity, message = received
            if message is None:
                self.greet(identity)
            elif isinstance(message, _ENTRIES):
                self._apply_entry(identity, message)
                logged.add(identity)
            elif isinstance(message, _OBJECT_CALLS):
                calls.append((identity, message))
                if isinstance(message, PutObject):
                    num_bytes += len(message.data)
            elif isinstance(message, OpenSession):
                self._open_session(identity, message)
            elif isinstance(message, ReleaseKey):
                self._requests.release_key(message.owner, message.key)
            elif isinstance(message, ClaimRequests | TakeDuty | LeaveDuty):
                replies += self._try(self._change_owner, identity, message)
            else:
                others.append((identity, message))
        replies += self._commit(calls)
        for identity in logged:
            if (
                opened := self._requests.sessions.get(self._sessions.get(identity, b""))
            ) is not None:
                replies.append((identity, Logged(opened.last_number)))
        for identity, message in others:
            replies += self._try(self._answer, identity, message)
        replies += self._reader_updates()
        for identity, reply in replies:
            self._send(identity, reply)
        self._evict_old()
        self._report_changes()

    def close(self) -> None:
        """Close the database."""
        self._requests.close()
        self._database.close()

    def _send(self, identity: bytes, message: FromStore) -> None:
        try:
            self._hub.send(identity, message)
        except FrameTooLarge as error:
            if isinstance(message, RequestState):
                self._hub.send(identity, RequestState(message.call_id, error=str(error)))

    def greet(self, identity: bytes) -> None:
        """Send a greeting to a frontend that has connected."""
        self._peers.add(identity)
        for reader in [reader for reader in self._attached if reader[0] == identity]:
            self._detach(reader)
        self._sessions.pop(identity, None)
        self._hub.send(identity, StoreHello(self._state()))

    def _open_session(self, identity: bytes, message: OpenSession) -> None:
        self._sessions[identity] = message.session
        last_number = self._requests.open_session(message, identity)
        self._hub.send(identity, SessionOpened(last_number))

    def _end_dead_engines(self) -> None:
        """Periodically turn the requests of other engines that have exited into orphans."""
        if not self._requests.has_other_engines or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + SHARING_MS / 1000
        if self._requests.end_dead_engines():
            # Now this engine's frontends can claim the orphans of the other engine.
            self._known = StoreState()

    def _apply_entry(self, identity: bytes, entry: LogEntry) -> None:
        session = self._sessions.get(identity)
        if session is None:
            return
        if isinstance(entry, BeginRequest) and not self._has_room(len(entry.record)):
            # The request is served without being recorded.
            self._requests.skip(session, entry)
            return
        self._requests.apply(session, entry)

    def _has_room(self, size: int) -> bool:
        """Return whether a request fits if all finished requests are deleted for it."""
        return self._requests.num_unfinished_bytes + size < self._limits.size_limit * LOW_WATER

    def _commit(self, calls: list[Call]) -> list[Sent]:
        """Apply calls and write the changes of requests in one transaction. Return the replies to the calls."""
        replies: list[Sent] = []

        def write_all() -> None:
            replies.clear()
            if self._requests.has_statements:
                self._requests.write()
                self._make_room(0)
            for identity, call in calls:
                replies.append((identity, self._apply_call(call)))

        if self._requests.has_statements or not all(_only_reads(call) for _, call in calls):
            if self._database.may_write and self._database.write(write_all):
                self._requests.record_write()
                return replies
            # The sizes were counted for a transaction that was not committed.
            self._objects.count()
            self._requests.record_lost_write()
        return [(identity, self._read(call)) for identity, call in calls]

    def _apply_call(self, call: ObjectCall) -> ObjectReply:
        if isinstance(call, PutObject):
            size = len(call.data) + ROW_BYTES
            if size > self._limits.size_limit * LOW_WATER:
                return ObjectReply(
                    call.call_id,
                    error=(
                        f"the object has {size} bytes, which is too much for a store of "
                        f"{self._limits.size_limit} bytes; raise --store-max-size or send less"
                    ),
                )
            self._make_room(size)
        return self._objects.apply(call)

    def _read(self, call: ObjectCall) -> ObjectReply:
        """Return the reply to a call while nothing can be written."""
        if not _only_reads(call):
            return ObjectReply(call.call_id, error=self._database.trouble)
        try:
            return self._objects.apply(call)
        except sqlite3.Error as error:
            self._database.record_failure(error)
            return ObjectReply(call.call_id, error=self._database.trouble)

    def _answer(self, identity: bytes, message: ToStore) -> list[Sent]:
        """Return the replies to a message about recorded requests."""
        session = self._sessions.get(identity, b"")
        match message:
            case AttachRequest():
                return self._attach(identity, message)
            case DetachRequest():
                return self._detach((identity, message.call_id))
            case ReserveKey():
                try:
                    return [(identity, self._requests.reserve_key(session, message))]
                except sqlite3.Error as error:
                    self._database.record_failure(error)
                    return [(identity, KeyReply(message.call_id, error=self._database.trouble))]
        return []

    def _attach(self, identity: bytes, call: AttachRequest) -> list[Sent]:
        name = (call.owner, call.request_id)
        request = self._requests.live.by_name.get(name)
        states = self._requests.find_finished(*name) if request is None else request.states
        record = b"" if states is None else self._requests.find_record(*name)
        if states is None or not record:
            return [(identity, RequestState(call.call_id))]
        replies: list[Sent] = [(identity, RequestState(call.call_id, record, states))]
        if request is not None:
            reader = (identity, call.call_id)
            request.readers[reader] = [
                -1 if stream.end is not None else len(stream.tokens) for stream in request.streams
            ]
            self._attached[reader] = request
            replies += self._report_readers(request)
        return replies

    def _detach(self, reader: tuple[bytes, int]) -> list[Sent]:
        request = self._attached.pop(reader, None)
        if request is None:
            return []
        request.readers.pop(reader, None)
        return self._report_readers(request)

    def _report_readers(self, request: LiveRequest) -> list[Sent]:
        """Return a message for the owner of a request that says how many clients read it."""
        owner = self._requests.sessions.get(request.session)
        if owner is None or request.session == ORPHAN:
            return []
        num_readers = len(request.readers)
        return [(owner.identity, ReadersChanged(request.request_id, request.owner, num_readers))]

    def _reader_updates(self) -> list[Sent]:
        """Return the tokens that readers have not received, as messages."""
        live = self._requests.live
        updates: list[Sent] = []
        for request in dict.fromkeys(chain(live.changed, self._attached.values())):
            is_over = live.by_name.get(request.name) is not request
            for reader in list(request.readers):
                if (new := request.take_update(reader)) is not None:
                    updates.append((reader[0], new))
                if is_over:
                    if not request.has_ended:
                        updates.append((reader[0], RequestUpdate(reader[1], [], is_gone=True)))
                    self._attached.pop(reader, None)
        live.changed.clear()
        return updates

    def _try(
        self, answer: Callable[[bytes, Message], list[Sent]], identity: bytes, message: Message
    ) -> list[Sent]:
        """Return the replies to a message. If the database fails there are none, and the frontend's call times out."""
        try:
            return answer(identity, message)
        except sqlite3.Error as error:
            self._database.record_failure(error)
            return []

    def _change_owner(
        self, identity: bytes, message: ClaimRequests | TakeDuty | LeaveDuty
    ) -> list[Sent]:
        """Apply a message that changes the owner of requests or duties.

        This must be committed before the reply is sent.
        """
        session = self._sessions.get(identity, b"")
        if session not in self._requests.sessions:
            return []
        match message:
            case ClaimRequests():
                return [(identity, self._requests.claim(session, message))]
            case TakeDuty():
                return [(identity, self._requests.take_duty(session, message))]
            case LeaveDuty():
                self._requests.leave_duty(session, message.name)
        return []

    @property
    def _size(self) -> int:
        return self._objects.num_bytes + self._requests.size

    def _make_room(self, size: int) -> None:
        limit = self._limits.size_limit
        if self._size + size <= limit:
            return
        while self._size + size > limit * LOW_WATER:
            if not self._evict_oldest(math.inf):
                break

    def _evict_oldest(self, before: float) -> bool:
        """Delete the oldest object or finished request, if it is older than `before`. Return whether there was one."""
        ages = [
            (age, table)
            for table in (self._objects, self._requests)
            if (age := table.oldest_change()) is not None and age < before
        ]
        if not ages:
            return False
        _, table = min(ages, key=lambda item: item[0])
        table.evict_oldest(before)
        self._num_evicted += 1
        return True

    def _evict_old(self) -> None:
        """Delete expired objects and requests, a few at a time."""
        if time.monotonic() < self._evict_at or not self._database.may_write:
            return
        before = time.time() - self._limits.max_age_s
        is_done = True

        def evict() -> None:
            nonlocal is_done
            is_done = not all(self._evict_oldest(before) for _ in range(TURN_MESSAGES))

        if not self._database.write(evict):
            self._objects.count()
            self._requests.count()
        if is_done:
            self._evict_at = time.monotonic() + EVICT_S
            if self._database.is_file and not self._database.trouble:
                self._database.give_back_pages(VACUUM_PAGES)

    def _report_changes(self) -> None:
        state, now = self._state(), time.monotonic()
        is_urgent = (state.trouble, state.num_orphans) != (
            self._known.trouble,
            self._known.num_orphans,
        )
        if state == self._known or (not is_urgent and now < self._report_at):
            return
        self._known, self._report_at = state, now + REPORT_S
        for identity in self._peers:
            self._hub.send(identity, StateChanged(state))

    def _state(self) -> StoreState:
        return StoreState(
            self._database.trouble,
            self._database.is_file,
            self._size,
            self._objects.num_objects,
            self._num_evicted,
            self._requests.num_finished,
            len(self._requests.live),
            self._requests.live.num_orphans,
        )


def _only_reads(call: ObjectCall) -> bool:
    return isinstance(call, GetObject | ListObjects)
