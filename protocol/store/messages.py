"""Messages about stored objects, such as files, batches and responses.

Frontends send calls with a number that the store's reply repeats. The store applies the calls of one connection in
order, and replies after the transaction was committed.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from .requests import (
    AttachRequest,
    ClaimReply,
    ClaimRequests,
    DetachRequest,
    DutyReply,
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

# Frontend -> store


class PutObject(msgspec.Struct, tag="put", array_like=True, gc=False, frozen=True):
    """Store an object, or replace the data of the object with this kind, ID and owner.

    A replaced object keeps its place in lists and its time of creation.
    """

    call_id: int
    kind: str
    object_id: str
    owner: str
    data: bytes
    parent: str = ""


class GetObject(msgspec.Struct, tag="get", array_like=True, gc=False, frozen=True):
    """Return one object of an owner, if it exists."""

    call_id: int
    kind: str
    object_id: str
    owner: str


class DeleteObject(msgspec.Struct, tag="delete", array_like=True, gc=False, frozen=True):
    """Delete one object of an owner."""

    call_id: int
    kind: str
    object_id: str
    owner: str


class DeleteChildren(msgspec.Struct, tag="delete children", array_like=True, gc=False, frozen=True):
    """Delete all objects of an owner with this kind and parent."""

    call_id: int
    kind: str
    parent: str
    owner: str


class ListObjects(msgspec.Struct, tag="list", array_like=True, gc=False, frozen=True):
    """Return objects of one owner and kind, in the order of their creation.

    `parent` is None for all parents. The page begins after the object with the ID `after`; "" for the first page. If
    `is_descending`, the newest object comes first.
    """

    call_id: int
    kind: str
    owner: str
    parent: str | None = None
    after: str = ""
    limit: int = 20
    is_descending: bool = False


ObjectCall: TypeAlias = PutObject | GetObject | DeleteObject | DeleteChildren | ListObjects

StoreCall: TypeAlias = ObjectCall | AttachRequest | ReserveKey | ClaimRequests | TakeDuty
"""The calls about objects. The store answers each with an `ObjectReply`."""

ToStore: TypeAlias = StoreCall | LogEntry | OpenSession | DetachRequest | ReleaseKey | LeaveDuty

# Store -> frontend


class StoredObject(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """An object with its `data`. `created_at` is in seconds since 1970."""

    object_id: str
    parent: str
    created_at: float
    data: bytes


class StoreState(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The state of the store.

    `trouble` says why the file of `--store` cannot be written; "" if it can. Unless `has_file`, everything is in
    memory. `num_requests` counts the requests whose answers are kept, `num_unfinished` those still being generated, and
    `num_orphans` the unfinished ones whose frontend has exited.
    """

    trouble: str = ""
    has_file: bool = False
    num_bytes: int = 0
    num_objects: int = 0
    num_evicted: int = 0
    num_requests: int = 0
    num_unfinished: int = 0
    num_orphans: int = 0


class StoreHello(msgspec.Struct, tag="hello", array_like=True, gc=False, frozen=True):
    """The greeting of a new connection. The frontend must repeat the calls that were not answered."""

    state: StoreState


class StateChanged(msgspec.Struct, tag="state", array_like=True, gc=False, frozen=True):
    """The state of the store has changed. Only changes of `trouble` are sent immediately."""

    state: StoreState


class ObjectReply(msgspec.Struct, tag="objects", array_like=True, gc=False, frozen=True):
    """The reply to a call about objects. If `error` is set, the call failed and changed nothing.

    `is_unknown` says that the object after which the page was to begin does not exist.
    """

    call_id: int
    objects: list[StoredObject] = []
    has_more: bool = False
    num_deleted: int = 0
    is_unknown: bool = False
    error: str = ""


FromStore: TypeAlias = (
    StoreHello
    | StateChanged
    | ObjectReply
    | SessionOpened
    | Logged
    | RequestState
    | RequestUpdate
    | KeyReply
    | ClaimReply
    | DutyReply
    | ReadersChanged
)
