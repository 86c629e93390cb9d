"""The stored objects: responses, conversations, files and other things that endpoints keep for clients."""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from ...protocol.store.messages import (
    DeleteChildren,
    DeleteObject,
    GetObject,
    ListObjects,
    ObjectCall,
    ObjectReply,
    PutObject,
    StoredObject,
)
from .database import Database

ROW_BYTES: Final = 256
"""Approximate bytes of an object without its data: its row and its entries in three indexes."""

REPLY_BYTES: Final = 32 * 1024 * 1024
"""Maximum bytes of a page of objects. A page has at least one object."""

MAX_PAGE: Final = 1000
"""Maximum number of objects on a page."""

_COLUMNS: Final = "id, parent, created, data"


class Objects:
    """The table of objects. Every object belongs to an owner, and does not exist for anybody else.

    Its methods must run in a transaction of the database if they write.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.num_bytes = self.num_objects = 0
        self.count()

    def count(self) -> None:
        """Count the objects and their size again, after a transaction was lost."""
        statement = f"SELECT count(*), coalesce(sum(size + {ROW_BYTES}), 0) FROM objects"
        try:
            self.num_objects, self.num_bytes = self._row(statement)
        except sqlite3.Error as error:
            self._database.record_failure(error)
            self.num_objects = self.num_bytes = 0

    def apply(self, call: ObjectCall) -> ObjectReply:
        """Apply a call and return its reply."""
        match call:
            case PutObject():
                self._put(call)
                return ObjectReply(call.call_id)
            case GetObject():
                rows = self._rows(
                    f"SELECT {_COLUMNS} FROM objects WHERE kind = ? AND id = ? AND owner = ?",
                    (call.kind, call.object_id, call.owner),
                )
                return ObjectReply(call.call_id, [StoredObject(*row) for row in rows])
            case DeleteObject():
                where = "kind = ? AND id = ? AND owner = ?"
                num_deleted = self._delete(where, (call.kind, call.object_id, call.owner))
                return ObjectReply(call.call_id, num_deleted=num_deleted)
            case DeleteChildren():
                where = "kind = ? AND parent = ? AND owner = ?"
                num_deleted = self._delete(where, (call.kind, call.parent, call.owner))
                return ObjectReply(call.call_id, num_deleted=num_deleted)
            case ListObjects():
                return self._list(call)

    def evict_oldest(self, before: float) -> int:
        """Delete the object that has been unchanged for the longest time. Return its size; 0 if there is none.

        Only objects that were last changed before `before` (seconds since 1970) are considered.
        """
        rows = self._rows(
            "SELECT position, size FROM objects WHERE changed < ? ORDER BY changed LIMIT 1",
            (before,),
        )
        if not rows:
            return 0
        [(position, _)] = rows
        size_before = self.num_bytes
        self._delete("position = ?", (position,))
        return size_before - self.num_bytes

    def oldest_change(self) -> float | None:
        """Return when the object that has been unchanged for longest was changed; None if there are no objects."""
        oldest: float | None = self._row("SELECT min(changed) FROM objects")[0]
        return oldest

    def _put(self, call: PutObject) -> None:
        now = self._database.time_of_change()
        size = len(call.data) + len(call.object_id) + len(call.parent) + len(call.owner)
        before = self._rows(
            "SELECT size FROM objects WHERE kind = ? AND id = ? AND owner = ?",
            (call.kind, call.object_id, call.owner),
        )
        self._database.connection.execute(
            "INSERT INTO objects (kind, id, owner, parent, created, changed, size, data) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (kind, id, owner) DO UPDATE SET "
            "parent = excluded.parent, changed = excluded.changed, size = excluded.size, data = excluded.data",
            (call.kind, call.object_id, call.owner, call.parent, now, now, size, call.data),
        )
        self.num_objects += not before
        self.num_bytes += size - before[0][0] if before else size + ROW_BYTES

    def _delete(self, where: str, values: tuple[object, ...]) -> int:
        rows = self._rows(f"DELETE FROM objects WHERE {where} RETURNING size", values)
        self.num_objects -= len(rows)
        self.num_bytes -= sum(size + ROW_BYTES for (size,) in rows)
        return len(rows)

    def _list(self, call: ListObjects) -> ObjectReply:
        where, values = "kind = ? AND owner = ?", [call.kind, call.owner]
        if call.parent is not None:
            where += " AND parent = ?"
            values.append(call.parent)
        order, beyond = ("DESC", "<") if call.is_descending else ("ASC", ">")
        positions: list[object] = []
        if call.after:
            found = self._rows(
                "SELECT position FROM objects WHERE kind = ? AND owner = ? AND id = ?",
                (call.kind, call.owner, call.after),
            )
            if not found:
                return ObjectReply(call.call_id, is_unknown=True)
            where += f" AND position {beyond} ?"
            positions = [found[0][0]]
        limit = min(max(call.limit, 1), MAX_PAGE)
        cursor = self._database.connection.execute(
            f"SELECT {_COLUMNS} FROM objects WHERE {where} ORDER BY position {order} LIMIT ?",
            (*values, *positions, limit + 1),
        )
        objects: list[StoredObject] = []
        num_bytes = 0
        has_more = False
        for row in cursor:
            num_bytes += len(row[3])
            if len(objects) == limit or (objects and num_bytes > REPLY_BYTES):
                has_more = True
                break
            objects.append(StoredObject(*row))
        cursor.close()
        return ObjectReply(call.call_id, objects, has_more)

    def _rows(self, statement: str, values: tuple[object, ...] = ()) -> list[Any]:
        return self._database.connection.execute(statement, values).fetchall()

    def _row(self, statement: str) -> Any:
        return self._database.connection.execute(statement).fetchone()
