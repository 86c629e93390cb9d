"""The store's loop: it applies what frontends send in one transaction a turn, and replies after the commit."""

from __future__ import annotations

import sqlite3
import time
from typing import Any, Final

import zmq

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
from ...protocol.transport import Hub
from .database import Database
from .objects import ROW_BYTES, Objects

TURN_MESSAGES: Final = 256
"""Maximum number of messages that are applied in one transaction."""
TURN_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of the objects that are written in one transaction."""

EVICT_S: Final = 10.0
"""Seconds between searches for objects that are too old."""

REPORT_S: Final = 1.0
"""Minimum seconds between reports of a changed size."""

LOW_WATER: Final = 0.9
"""Share of the maximum size to which the store is emptied when it is full, so that this is rare."""

VACUUM_PAGES: Final = 256
"""Free pages that are returned to the file system at once."""

Call = tuple[bytes, ObjectCall]


class StoreServer:
    """The store of one engine: a database, and a socket for the frontends.

    Raises:
        ConfigError: The database cannot be opened.
    """

    def __init__(self, config: EngineConfig, context: zmq.Context[Any]) -> None:
        self._limits = config.store
        self._database = Database(config.store.path)
        self._objects = Objects(self._database)
        self._num_evicted = 0
        self._evict_at = 0.0
        self._known = StoreState()
        self._report_at = 0.0
        self._peers: set[bytes] = set()
        self._hub: Hub[ToStore] = Hub(context, config.store_address(), ToStore)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Readable when `turn` has something to do."""
        return self._hub.socket

    @property
    def num_dropped_frames(self) -> int:
        """The number of invalid frames."""
        return self._hub.num_dropped_frames

    def turn(self) -> None:
        """Apply the messages that have arrived, commit, and reply."""
        calls: list[Call] = []
        num_bytes = 0
        while len(calls) < TURN_MESSAGES and num_bytes < TURN_BYTES:
            if (received := self._hub.receive()) is None:
                break
            identity, message = received
            if message is None:
                self._peers.add(identity)
                self._hub.send(identity, StoreHello(self._state()))
                continue
            calls.append((identity, message))
            if isinstance(message, PutObject):
                num_bytes += len(message.data)
        for identity, reply in self._apply(calls):
            self._hub.send(identity, reply)
        self._evict_old()
        self._report_changes()

    def close(self) -> None:
        """Close the socket and the database."""
        self._hub.close()
        self._database.close()

    def _apply(self, calls: list[Call]) -> list[tuple[bytes, FromStore]]:
        """Apply calls in one transaction, and return the replies to send after it."""
        if not calls:
            return []
        replies: list[tuple[bytes, FromStore]] = []

        def apply_all() -> None:
            replies.clear()
            for identity, call in calls:
                replies.append((identity, self._apply_one(call)))

        if not all(_only_reads(call) for _, call in calls):
            if self._database.may_write and self._database.write(apply_all):
                return replies
            # The size was counted for a transaction that did not take place.
            self._objects.count()
        replies.clear()
        for identity, call in calls:
            replies.append((identity, self._read(call)))
        return replies

    def _apply_one(self, call: ObjectCall) -> ObjectReply:
        if isinstance(call, PutObject):
            size = len(call.data) + ROW_BYTES
            if size > self._limits.size_limit * LOW_WATER:
                return ObjectReply(
                    call.call_id,
                    error=f"the object has {size} bytes, which is too much for a store of {self._limits.size_limit} bytes",
                )
            self._make_room(size)
        return self._objects.apply(call)

    def _read(self, call: ObjectCall) -> ObjectReply:
        """Return the reply to a call if nothing can be written."""
        if not _only_reads(call):
            return ObjectReply(call.call_id, error=self._database.trouble)
        try:
            return self._objects.apply(call)
        except sqlite3.Error as error:
            self._database.record_failure(error)
            return ObjectReply(call.call_id, error=self._database.trouble)

    def _make_room(self, size: int) -> None:
        limit = self._limits.size_limit
        if self._objects.num_bytes + size <= limit:
            return
        before = time.time() + 1
        while self._objects.num_bytes + size > limit * LOW_WATER:
            if not self._objects.evict_oldest(before):
                break
            self._num_evicted += 1

    def _evict_old(self) -> None:
        """Delete objects that are too old, from time to time and in the background of other work."""
        if time.monotonic() < self._evict_at or not self._database.may_write:
            return
        before = time.time() - self._limits.max_age_s
        oldest = self._objects.oldest_change()
        if oldest is not None and oldest < before:

            def evict() -> None:
                for _ in range(TURN_MESSAGES):
                    if not self._objects.evict_oldest(before):
                        self._evict_at = time.monotonic() + EVICT_S
                        return
                    self._num_evicted += 1

            if not self._database.write(evict):
                self._objects.count()
        else:
            self._evict_at = time.monotonic() + EVICT_S
        if self._database.is_file and not self._database.trouble:
            self._database.connection.execute(
                f"PRAGMA incremental_vacuum({VACUUM_PAGES})"
            ).fetchall()

    def _report_changes(self) -> None:
        state, now = self._state(), time.monotonic()
        if state == self._known or (state.trouble == self._known.trouble and now < self._report_at):
            return
        self._known, self._report_at = state, now + REPORT_S
        for identity in self._peers:
            self._hub.send(identity, StateChanged(state))

    def _state(self) -> StoreState:
        return StoreState(
            self._database.trouble,
            self._objects.num_bytes,
            self._objects.num_objects,
            self._num_evicted,
        )


def _only_reads(call: ObjectCall) -> bool:
    return isinstance(call, GetObject | ListObjects)
