"""Messages about stored objects.

Frontends send calls, each with a number that the store's reply repeats. The store applies the calls of one connection
in order. It replies after the transaction was committed.
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
    RequestNews,
    RequestState,
    ReserveKey,
    SessionOpened,
    TakeDuty,
)

# frontend -> store


class PutObject(msgspec.Struct, tag="put", array_like=True, gc=False, frozen=True):
    """Store an object, or replace the data of the one with this kind, ID and owner.

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
    """Delete all objects of an owner that have a kind and a parent."""

    call_id: int
    kind: str
    parent: str
    owner: str


class ListObjects(msgspec.Struct, tag="list", array_like=True, gc=False, frozen=True):
    """Return objects of an owner and a kind in the order in which they were created.

    `parent` is None for all parents. `after` is the ID of the object after which the page begins; "" for the first
    page. With `is_descending` the newest object is the first.
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
"""Calls that the store answers."""

ToStore: TypeAlias = StoreCall | LogEntry | OpenSession | DetachRequest | ReleaseKey | LeaveDuty

# store -> frontend


class StoredObject(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """An object with its `data`. `created_at` is in seconds since 1970."""

    object_id: str
    parent: str
    created_at: float
    data: bytes


class StoreState(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The state of the store.

    `trouble` is why the file of `--store` is not written, if there is a reason; "" if all is well. Without `has_file`
    everything is in memory. `num_requests` counts the requests whose answers are kept, `num_unfinished` those that are
    being generated, and `num_orphans` those of them whose frontend is gone.
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
    """The greeting of a new connection. Calls without a reply must be sent again."""

    state: StoreState


class StateChanged(msgspec.Struct, tag="state", array_like=True, gc=False, frozen=True):
    """The state of the store has changed. Only changes of `trouble` are sent at once."""

    state: StoreState


class ObjectReply(msgspec.Struct, tag="objects", array_like=True, gc=False, frozen=True):
    """The reply to a call about objects. `error` is set if it failed and changed nothing.

    `is_unknown` says that the object does not exist after which the page was to begin.
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
    | RequestNews
    | KeyReply
    | ClaimReply
    | DutyReply
    | ReadersChanged
)
