"""The sessions of frontend processes, and the duties and keys that at most one of them has at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from ...protocol.store.requests import LogTokens, ReserveKey

Statement = tuple[str, tuple[object, ...]]

_encode: Final = msgspec.msgpack.Encoder().encode
decode_duties: Final = msgspec.msgpack.Decoder(list[str]).decode


class Session(msgspec.Struct):
    """A frontend process of the engine with a run directory.

    `identity` is the identity of its connection; b"" while it is not connected. `duties` are the names of its duties.
    """

    run: str
    client_index: int
    last_number: int
    duties: list[str] = []
    identity: bytes = b""


class Sessions(dict[bytes, Session]):
    """The sessions of all frontends that use a store, by ID."""

    def find_earlier(self, session: bytes, run: str, client_index: int) -> list[bytes]:
        """Return the sessions of earlier processes of a frontend."""
        place = (run, client_index)
        return [
            other
            for other, opened in self.items()
            if other != session and (opened.run, opened.client_index) == place
        ]

    def take_duty(self, session: bytes, name: str) -> bool:
        """Give a duty to a session, unless another session has it. Return whether this session has it now."""
        for other, opened in self.items():
            if name in opened.duties:
                return other == session
        self[session].duties.append(name)
        return True

    def leave_duty(self, session: bytes, name: str) -> None:
        """Release a duty, so that another session can take it."""
        duties = self[session].duties
        if name in duties:
            duties.remove(name)

    def save(self, session: bytes) -> Statement:
        """Return the statement that writes a session."""
        opened = self[session]
        return (
            "INSERT OR REPLACE INTO sessions (id, run, client, last_number, duties) VALUES (?, ?, ?, ?, ?)",
            (
                session,
                opened.run,
                opened.client_index,
                opened.last_number,
                _encode(opened.duties),
            ),
        )

    def save_all(self) -> Iterator[Statement]:
        """Yield the statements that replace all rows."""
        yield "DELETE FROM sessions", ()
        yield from map(self.save, self)


class LoggedStreams(dict[bytes, bytes]):
    """The streams of each session's last entry in the log. The next entry does not repeat them if they are the same."""

    def shorten(self, session: bytes, entry: LogTokens) -> LogTokens:
        """Return an entry in the shortened form in which it is written into the log."""
        if self.get(session) == entry.streams:
            return msgspec.structs.replace(entry, streams=b"")
        self[session] = entry.streams
        return entry

    def restore(self, session: bytes, entry: LogTokens) -> LogTokens:
        """Return an entry of the log in the form in which it was received."""
        if entry.token_ids and not entry.streams:
            return msgspec.structs.replace(entry, streams=self.get(session, b""))
        self[session] = entry.streams
        return entry


class ReservedKeys:
    """The keys that sessions have reserved for requests that have not begun."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], tuple[bytes, int]] = {}
        """(owner, key) -> the session that reserved the key, and its call."""

    def reserve(self, session: bytes, call: ReserveKey) -> bool:
        """Reserve a key. Return False if another call has it.

        One call may arrive twice, on two connections.
        """
        caller = (session, call.call_id)
        return self._holders.setdefault((call.owner, call.key), caller) == caller

    def release(self, owner: str, key: str) -> None:
        """Release a key, so that another request can use it."""
        self._holders.pop((owner, key), None)

    def end_session(self, session: bytes) -> None:
        """Release all keys of a session."""
        for name in [name for name, holder in self._holders.items() if holder[0] == session]:
            del self._holders[name]
