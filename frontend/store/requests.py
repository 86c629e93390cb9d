"""The tables of requests: a row for each request, and a log of the changes to unfinished requests.

The state of unfinished requests is in memory. The log has the changes since the last checkpoint. A checkpoint writes
the whole state into the rows and empties the log. So a step of all streams writes one row, and the end of a request
writes one.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from ...protocol.store.requests import (
    AdoptRequest,
    BeginRequest,
    ClaimedRequest,
    ClaimReply,
    ClaimRequests,
    DutyReply,
    EndStream,
    KeyReply,
    LogEntry,
    LogTokens,
    MoveStream,
    OpenSession,
    ReserveKey,
    StreamState,
    TakeDuty,
)
from .database import Database
from .journal import read_journal
from .live_requests import LiveRequest, LiveRequests
from .other_engines import OtherEngines
from .sessions import LoggedStreams, ReservedKeys, Session, Sessions, Statement, decode_duties

ROW_BYTES: Final = 512
"""Approximate bytes of a request without its record and its tokens."""

CHECKPOINT_BYTES: Final = 4 * 1024 * 1024
"""Bytes of the log at which a checkpoint is written, unless the state of the unfinished requests is larger.

A larger state is written when the log has the same size, so no token is written more than twice on average.
"""
IDLE_BYTES: Final = 64 * 1024
"""Bytes of the log at which a checkpoint is written while no request is unfinished."""

CLAIM_BYTES: Final = 64 * 1024 * 1024
"""Bytes of the requests in one claim above which the other requests wait for the next claim."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_states: Final = msgspec.msgpack.Decoder(list[StreamState]).decode
_decode_entry: Final = msgspec.msgpack.Decoder(LogEntry).decode


class Requests:
    """The requests of all frontends.

    Entries change the state in memory immediately. Their changes to the database are collected, and `write` writes them
    in a transaction. If the transaction fails, the caller calls `record_lost_write`, and the next checkpoint writes
    everything.

    Attributes:
        live: The requests that have not ended.
        sessions: The sessions of the frontends that use this store.
        keys: The idempotency keys of requests that have not begun.

    Args:
        database: The database.
        run: The run directory of this engine.
        find_journal: Returns the path of the journal of a session.
    """

    def __init__(self, database: Database, run: str, find_journal: Callable[[bytes], Path]) -> None:
        self._database = database
        self._run = run
        self._find_journal = find_journal
        self._read_journals: list[Path] = []
        self._other_engines = OtherEngines()
        self.live = LiveRequests()
        self.sessions = Sessions()
        self.keys = ReservedKeys()
        self._statements: list[Statement] = []
        self._logged_streams = LoggedStreams()
        self._begun: list[LiveRequest] = []
        self._log_bytes = self._checkpoint_bytes = 0
        self._is_stale = self._has_checkpoint = False
        self._must_save_numbers = False
        self.num_bytes = self.num_finished = 0
        try:
            self._load()
        except sqlite3.DatabaseError as error:
            database.record_failure(error)
            self.live = LiveRequests()
            self.count()

    def _load(self) -> None:
        """Read the unfinished requests. The requests of an engine that has exited become orphans."""
        self.count()
        rows = self._rows("SELECT id, run, client, last_number, duties FROM sessions")
        for session, run, client, last_number, duties in rows:
            self.sessions[session] = Session(run, client, last_number, decode_duties(duties))
        for row in self._rows(
            "SELECT owner, id, key, session, numbers, num_starts, claimed_at, size, state FROM requests "
            "WHERE NOT is_finished"
        ):
            owner, request_id, key, session, numbers, num_starts, claimed_at, size, states = row
            request = LiveRequest(request_id, owner, key, session, array("i", numbers).tolist())
            request.num_starts, request.claimed_at, request.size = num_starts, claimed_at, size
            if (opened := self.sessions.get(session)) is not None:
                request.run = opened.run
            for state in _decode_states(states):
                request.add_stream(state)
            self.live.add_request(request)
        for session, entry in self._rows("SELECT session, entry FROM log ORDER BY position"):
            self._log_bytes += len(entry)
            decoded = _decode_entry(entry)
            if isinstance(decoded, LogTokens):
                decoded = self._logged_streams.restore(session, decoded)
            self._replay(session, decoded)
            if (opened := self.sessions.get(session)) is not None:
                opened.last_number = max(opened.last_number, decoded.number)
        self.end_dead_engines()
        for session in {request.session for request in self.live} - self.sessions.keys():
            self.live.end_session(session)
        # The requests of ended sessions are written as orphans.
        self._is_stale = self._database.is_file

    def _replay(self, session: bytes, entry: LogEntry) -> None:
        match entry:
            case LogTokens():
                self.live.append_tokens(session, entry)
            case MoveStream():
                self.live.move(session, entry)
            case EndStream():
                self.live.end(session, entry)
            case _:
                pass

    def count(self) -> None:
        """Count the size of all requests again, after a transaction was lost."""
        statement = f"SELECT coalesce(sum(size + {ROW_BYTES}), 0), coalesce(sum(is_finished), 0) FROM requests"
        try:
            self.num_bytes, self.num_finished = self._rows(statement)[0]
        except sqlite3.Error as error:
            self._database.record_failure(error)
            self.num_bytes = self.num_finished = 0

    @property
    def size(self) -> int:
        """The size of the tables in bytes."""
        return self.num_bytes + self._log_bytes

    @property
    def num_unfinished_bytes(self) -> int:
        """The bytes of the records of unfinished requests, and of their log-probabilities."""
        return sum(request.size + request.size_of_logprobs + ROW_BYTES for request in self.live)

    @property
    def has_statements(self) -> bool:
        """True if `write` has something to write."""
        return bool(self._statements) or self._must_save_numbers or self._needs_checkpoint

    @property
    def has_other_engines(self) -> bool:
        """True if frontends of another engine use this store."""
        return any(opened.run != self._run for opened in self.sessions.values())

    def end_dead_engines(self) -> bool:
        """End the sessions of other engines that have exited. Return whether there were any."""
        runs = {opened.run for opened in self.sessions.values()} - {self._run}
        dead = {run for run in runs if not self._other_engines.is_alive(run)}
        for session, opened in list(self.sessions.items()):
            if opened.run in dead:
                self._end_session(session)
        for request in self.live:
            if request.run in dead:
                request.run = ""
        return bool(dead)

    def close(self) -> None:
        """Close the run directories of other engines."""
        self._other_engines.close()

    def open_session(self, message: OpenSession, identity: bytes) -> int:
        """Open a session, or continue it on a new connection. Return the number of the last entry that it has sent."""
        session, run, client_index = message.session, message.run, message.client_index
        for earlier in self.sessions.find_earlier(session, run, client_index):
            self._end_session(earlier)
        opened = self.sessions.get(session)
        if opened is None:
            opened = self.sessions[session] = Session(run, client_index, 0)
            self._statements.append(self.sessions.save(session))
        opened.identity = identity
        return opened.last_number

    def _end_session(self, session: bytes) -> None:
        """End a session whose process has exited, after applying what only its journal has."""
        journal = self._find_journal(session)
        for entry in read_journal(journal):
            self.apply(session, entry)
        self._read_journals.append(journal)
        del self.sessions[session]
        self.keys.end_session(session)
        for request in self.live.end_session(session):
            self._save_owner(request)
        self._add("DELETE FROM sessions WHERE id = ?", session)

    def apply(self, session: bytes, entry: LogEntry) -> None:
        """Apply an entry of a session, unless it was applied before."""
        opened = self.sessions.get(session)
        if opened is None or entry.number <= opened.last_number:
            return
        opened.last_number = entry.number
        num_before = self._log_bytes
        self._apply(session, entry)
        # The log stores the numbers of its entries.
        self._must_save_numbers |= self._log_bytes == num_before

    def _apply(self, session: bytes, entry: LogEntry) -> None:
        match entry:
            case BeginRequest():
                self._begin(session, entry)
            case AdoptRequest():
                if (request := self.live.adopt(session, entry)) is not None:
                    self._save_owner(request)
            case LogTokens():
                if self.live.append_tokens(session, entry):
                    self._append_to_log(session, entry)
            case MoveStream():
                self.live.move(session, entry)
                self._append_to_log(session, entry)
            case EndStream():
                request = self.live.end(session, entry)
                if request is None:
                    return
                if request.is_aborted:
                    self._delete(request)
                elif request.has_ended:
                    self._finish(request)
                else:
                    self._append_to_log(session, entry)

    def skip(self, session: bytes, entry: LogEntry) -> None:
        """Record that an entry is not applied."""
        opened = self.sessions.get(session)
        if opened is not None:
            opened.last_number = max(opened.last_number, entry.number)
            self._must_save_numbers = True

    def reserve_key(self, session: bytes, call: ReserveKey) -> KeyReply:
        """Return the request with a key. If there is none, reserve the key for this session."""
        name = (call.owner, call.key)
        for request in self.live:
            if (request.owner, request.key) == name:
                return KeyReply(call.call_id, request.request_id)
        found = self._rows("SELECT id FROM requests WHERE owner = ? AND key = ?", *name)
        if found:
            return KeyReply(call.call_id, found[0][0])
        is_busy = not call.only_finds and not self.keys.reserve(session, call)
        return KeyReply(call.call_id, is_busy=is_busy)

    def release_key(self, owner: str, key: str) -> None:
        """Release a reserved key, or take it from the request that began with it."""
        self.keys.release(owner, key)
        for request in self.live:
            if (request.owner, request.key) == (owner, key):
                request.key = ""
        self._add("UPDATE requests SET key = '' WHERE owner = ? AND key = ?", owner, key)

    def take_duty(self, session: bytes, call: TakeDuty) -> DutyReply:
        """Give a duty to a session, unless another session has it."""
        has_it = self.sessions.take_duty(session, call.name)
        self._statements.append(self.sessions.save(session))
        return DutyReply(call.call_id, has_it)

    def leave_duty(self, session: bytes, name: str) -> None:
        """Release a session's duty, so that another session can take it."""
        self.sessions.leave_duty(session, name)
        self._statements.append(self.sessions.save(session))

    def claim(self, session: bytes, call: ClaimRequests) -> ClaimReply:
        """Give orphaned requests to a session.

        Orphans of a running engine are only given to frontends of that engine.
        """
        claimed: list[ClaimedRequest] = []
        run = self.sessions[session].run
        orphans = [request for request in self.live.orphans if request.run in ("", run)]
        # Requests that were read from a journal may not be committed yet.
        orphans = [request for request in orphans if request not in self._begun]
        size = 0
        for request in orphans[: max(call.limit, 1)]:
            size += request.size + 4 * request.num_tokens + request.size_of_logprobs
            if claimed and size > CLAIM_BYTES:
                break
            if not (record := self.find_record(*request.name)):
                self._delete(request)
                continue
            has_progressed = request.num_tokens > request.claimed_at
            request.num_starts = 1 if has_progressed else request.num_starts + 1
            request.claimed_at = request.num_tokens
            self.live.claim(request, session, run)
            self._save_owner(request)
            claimed.append(
                ClaimedRequest(
                    request.request_id,
                    request.owner,
                    record,
                    request.num_starts,
                    request.states,
                )
            )
        return ClaimReply(call.call_id, claimed)

    def find_finished(self, owner: str, request_id: str) -> list[StreamState] | None:
        """Return the streams of a finished request; None if there is no such request."""
        rows = self._rows(
            "SELECT state FROM requests WHERE owner = ? AND id = ? AND is_finished",
            owner,
            request_id,
        )
        return _decode_states(rows[0][0]) if rows else None

    def find_record(self, owner: str, request_id: str) -> bytes:
        """Return the record of a request; b"" if there is no such request."""
        query = "SELECT record FROM records WHERE owner = ? AND id = ?"
        rows = self._rows(query, owner, request_id)
        return bytes(rows[0][0]) if rows else b""

    def write(self) -> None:
        """Execute the statements that the entries need, in the caller's transaction."""
        execute = self._database.connection.execute
        for statement, values in self._statements:
            execute(statement, values)
        self._has_checkpoint = self._needs_checkpoint
        if self._has_checkpoint:
            self._checkpoint()
        if self._must_save_numbers:
            for session, opened in self.sessions.items():
                execute(
                    "UPDATE sessions SET last_number = ? WHERE id = ?",
                    (opened.last_number, session),
                )

    def record_write(self) -> None:
        """Record that the transaction of `write` was committed."""
        self._statements.clear()
        self._must_save_numbers = False
        self._begun.clear()
        while self._read_journals:
            self._read_journals.pop().unlink(missing_ok=True)
        if self._has_checkpoint:
            self._logged_streams.clear()
            self._log_bytes = 0
            self._is_stale = False

    def record_lost_write(self) -> None:
        """Record that the transaction of `write` failed.

        Requests that began in it are not recorded. The next checkpoint writes the other requests in full.
        """
        for request in self._begun:
            if self.live.by_name.get(request.name) is request:
                self.live.remove_request(request)
        self._statements.clear()
        self._logged_streams.clear()
        self._begun.clear()
        self._is_stale = True
        self.count()

    def oldest_change(self) -> float | None:
        """Return when the oldest finished request ended; None if there is none."""
        [row] = self._rows("SELECT min(changed) FROM requests WHERE is_finished")
        oldest: float | None = row[0]
        return oldest

    def evict_oldest(self, before: float) -> int:
        """Delete the finished request that ended first, if it ended before `before`. Return its size, or 0."""
        rows = self._rows(
            "DELETE FROM requests WHERE position = "
            "(SELECT position FROM requests WHERE is_finished AND changed < ? ORDER BY changed LIMIT 1) "
            "RETURNING owner, id, size",
            before,
        )
        if not rows:
            return 0
        [(owner, request_id, size)] = rows
        self._rows("DELETE FROM records WHERE owner = ? AND id = ?", owner, request_id)
        self.num_bytes -= size + ROW_BYTES
        self.num_finished -= 1
        return int(size) + ROW_BYTES

    @property
    def _needs_checkpoint(self) -> bool:
        limit = max(CHECKPOINT_BYTES, self._checkpoint_bytes) if len(self.live) else IDLE_BYTES
        return self._is_stale or self._log_bytes > limit

    def _checkpoint(self) -> None:
        """Write the state of all unfinished requests into their rows, and empty the log."""
        execute = self._database.connection.execute
        for name in self._rows("SELECT owner, id FROM requests WHERE NOT is_finished"):
            # The end of this request could not be written.
            if name not in self.live.by_name:
                execute("DELETE FROM requests WHERE owner = ? AND id = ?", name)
                execute("DELETE FROM records WHERE owner = ? AND id = ?", name)
        self._checkpoint_bytes = 0
        for request in self.live:
            state = _encode(request.states)
            self._checkpoint_bytes += len(state)
            execute(*_owner_statement(request, state))
        execute("DELETE FROM log")
        for statement in self.sessions.save_all():
            execute(*statement)

    def _begin(self, session: bytes, entry: BeginRequest) -> None:
        if entry.key:
            self.release_key(entry.owner, entry.key)
        request = self.live.begin(session, entry)
        if request is None:
            return
        request.run = self.sessions[session].run
        request.size = len(entry.record)
        self._begun.append(request)
        now = self._database.time_of_change()
        self.num_bytes += request.size + ROW_BYTES
        self._add(
            "INSERT OR REPLACE INTO requests (owner, id, key, session, numbers, num_starts, claimed_at, "
            "is_finished, created, changed, size, state) VALUES (?, ?, ?, ?, ?, 0, 0, 0, ?, ?, ?, ?)",
            *request.name,
            entry.key,
            session,
            entry.streams,
            now,
            now,
            len(entry.record),
            _encode(request.states),
        )
        record = "INSERT OR REPLACE INTO records (owner, id, record) VALUES (?, ?, ?)"
        self._add(record, *request.name, entry.record)

    def _finish(self, request: LiveRequest) -> None:
        state = _encode(request.states)
        self.live.remove_request(request)
        self.num_bytes += len(state)
        self.num_finished += 1
        self._add(
            "UPDATE requests SET is_finished = 1, session = x'', numbers = x'', state = ?, changed = ?, "
            "size = size + ? WHERE owner = ? AND id = ?",
            state,
            self._database.time_of_change(),
            len(state),
            *request.name,
        )

    def _delete(self, request: LiveRequest) -> None:
        self.live.remove_request(request)
        self.num_bytes -= request.size + ROW_BYTES
        self._add("DELETE FROM requests WHERE owner = ? AND id = ?", *request.name)
        self._add("DELETE FROM records WHERE owner = ? AND id = ?", *request.name)

    def _save_owner(self, request: LiveRequest) -> None:
        """Write the session of a request and its state, because earlier entries of the log no longer name it."""
        self._statements.append(_owner_statement(request, _encode(request.states)))

    def _append_to_log(self, session: bytes, entry: LogEntry) -> None:
        """Add an entry to the log. A database in memory needs none, because its state is lost together with the log."""
        if self._database.is_file and not self._is_stale:
            if isinstance(entry, LogTokens):
                entry = self._logged_streams.shorten(session, entry)
            encoded = _encode(entry)
            self._log_bytes += len(encoded)
            self._add("INSERT INTO log (session, entry) VALUES (?, ?)", session, encoded)

    def _add(self, statement: str, *values: object) -> None:
        self._statements.append((statement, values))

    def _rows(self, statement: str, *values: object) -> list[Any]:
        return self._database.connection.execute(statement, values).fetchall()


def _owner_statement(request: LiveRequest, state: bytes) -> Statement:
    return (
        "UPDATE requests SET session = ?, numbers = ?, num_starts = ?, claimed_at = ?, state = ? "
        "WHERE owner = ? AND id = ?",
        (
            request.session,
            array("i", request.numbers).tobytes(),
            request.num_starts,
            request.claimed_at,
            state,
            *request.name,
        ),
    )
