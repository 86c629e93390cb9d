"""A record of the last bytes of each streamed response, in memory that survives the frontend that sends them.

The system knows how many bytes of a connection it has accepted. Together with this record, that says exactly which
bytes of a response are still to be sent, and after which event it continues.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import re
import socket
import struct
import termios
from typing import Final, NamedTuple

NUM_SLOTS: Final = 1024
"""Maximum number of responses that are recorded at once. Memory is used only for those that there were."""

SLOT_BYTES: Final = 4096

_HEADER: Final = struct.Struct("qqqqq")
"""The number of recorded bytes; how many bytes of the connection the system had accepted before the response, and
before the recorded bytes; the state of the response; and the number of the record."""

_WORD: Final = struct.Struct("q")
"""A number that a crash leaves either unchanged or changed. A slot begins with one that says which of its two headers
is valid. The other is the first field of a header, which is written after the bytes that it counts."""

_START: Final = _WORD.size + 2 * _HEADER.size

TAIL_BYTES: Final = SLOT_BYTES - _START
"""Number of bytes of a response that are kept."""

MAX_UNSENT: Final = TAIL_BYTES // 2
"""Maximum bytes that a successor sends. The next bytes are written over older ones."""

_NONE, _BEGUN, _ENDED, _UNKNOWN = range(4)

_TCP_INFO_BYTES: Final = 128
_ACKNOWLEDGED: Final = struct.Struct("<120xQ")
_QUEUED: Final = struct.Struct("i")

_NOTE: Final = re.compile(rb"\0id: [^\n]*\n")
"""An event ID that is recorded but not sent. Responses have no zero bytes."""

_ID: Final = re.compile(rb"[\n\0]id: ([^\n]*)\n")


def count_accepted(connection: socket.socket) -> int:
    """Return the number of bytes that the system has accepted for a TCP connection, plus a constant.

    These are the bytes that its peer has acknowledged and those that wait in the system.

    Raises:
        OSError: The connection is not a TCP connection, or the system does not count its bytes.
    """
    while True:
        before = _acknowledged(connection)
        [queued] = _QUEUED.unpack(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
        if _acknowledged(connection) == before:
            return before + int(queued)


def _acknowledged(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _ACKNOWLEDGED.size:
        raise OSError("this system does not count the bytes of connections")
    return int(_ACKNOWLEDGED.unpack_from(info)[0])


class SentMemory:
    """The memory in which one frontend records what it sends.

    Attributes:
        fd: Its descriptor, which other processes can read.

    Raises:
        OSError: The system has no such memory.
    """

    def __init__(self) -> None:
        size = NUM_SLOTS * SLOT_BYTES
        self.fd = os.memfd_create("engine-sent")
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)
        self._free = list(range(NUM_SLOTS))[::-1]

    def take_slot(self) -> int | None:
        """Return a free slot; None if all are in use."""
        return self._free.pop() if self._free else None

    def free_slot(self, slot: int) -> None:
        """Make a slot available again."""
        self._free.append(slot)

    def close(self) -> None:
        """Release the memory of this process."""
        os.close(self.fd)


class SentRecord:
    """The record of one response.

    Args:
        memory: The memory of this frontend.
        slot: The place of the record.
        number: The number of the record. No other one of this memory has it.
        transport: The transport of a TCP connection.
        last_event_id: If another process has begun to send the response, the ID of the last event; otherwise "".
        unsent: The bytes up to that event which are still to be sent. They are recorded here.

    Raises:
        OSError: The system does not count the bytes of the connection.
    """

    __slots__ = (
        "_accepted",
        "_base",
        "_header",
        "_map",
        "_note",
        "_num",
        "_number",
        "_start",
        "_state",
        "_transport",
    )

    def __init__(
        self,
        memory: SentMemory,
        slot: int,
        number: int,
        transport: asyncio.Transport,
        last_event_id: str = "",
        unsent: bytes = b"",
    ) -> None:
        self._map = memory.map
        self._number = number
        self._transport = transport
        self._start = slot * SLOT_BYTES
        self._accepted = self._base = self._count_accepted()
        self._num = 0
        self._note = b""
        self._state = _UNKNOWN if last_event_id else _NONE
        self._publish()
        if last_event_id:
            self.note(last_event_id.encode())
            self._add_noted(unsent, _BEGUN)

    def add(self, data: bytes) -> None:
        """Record bytes that are about to be sent after the head of the response.

        If the client has disconnected before the first ones, they are not recorded.
        """
        if self._note or self._state == _NONE or len(data) > MAX_UNSENT:
            self._add_noted(data, _BEGUN)
        else:
            self._write(data)
            _WORD.pack_into(self._map, self._header, self._num)

    def note(self, event_id: bytes) -> None:
        """Record the ID of an event whose bytes, which come next, do not have it."""
        self._note = b"\0id: %b\n" % event_id

    def note_start(self, event_id: bytes) -> None:
        """Record the ID before the first event, if no part of the response was sent."""
        if self._state == _NONE:
            self.note(event_id)

    def add_end(self, data: bytes) -> None:
        """Record the last piece of the body, which is about to be sent with the end of the response."""
        data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        self._add_noted(data + b"0\r\n\r\n", _ENDED)

    def _add_noted(self, data: bytes, state: int) -> None:
        """Record bytes and the noted ID, with the new state of the response."""
        if self._state == _NONE:
            if self._transport.is_closing():
                return
            self._base = self._count_accepted()
        note, self._note = self._note, b""
        if len(data) > MAX_UNSENT:
            # They are written over bytes that may be unsent, and an ID before them over itself.
            self._state = _UNKNOWN
            self._publish()
            if ids := _ID.findall(data):
                note = b"\0id: %b\n" % ids[-1]
            data += note
        else:
            data = note + data
        self._base -= len(note)
        self._state = state
        self._write(data)
        self._publish()

    def _write(self, data: bytes) -> None:
        size = len(data)
        at = self._num % TAIL_BYTES
        self._num += size
        tail = self._start + _START
        if size <= TAIL_BYTES - at:
            self._map[tail + at : tail + at + size] = data
            return
        # The last bytes go to the end of the tail, and on from its beginning.
        end = self._num % TAIL_BYTES
        data = data[-TAIL_BYTES:]
        first = max(len(data) - end, 0)
        self._map[tail : tail + len(data) - first] = data[first:]
        self._map[tail + TAIL_BYTES - first : tail + TAIL_BYTES] = data[:first]

    def _count_accepted(self) -> int:
        """Return the number of bytes that the transport has accepted, plus a constant."""
        num_waiting = self._transport.get_write_buffer_size()
        return count_accepted(self._transport.get_extra_info("socket")) + num_waiting

    def _publish(self) -> None:
        """Write the header that is not valid, and then make it the valid one."""
        [which] = _WORD.unpack_from(self._map, self._start)
        self._header = self._start + _header_at(1 - which)
        fields = self._num, self._accepted, self._base, self._state, self._number
        _HEADER.pack_into(self._map, self._header, *fields)
        _WORD.pack_into(self._map, self._start, 1 - which)


def _header_at(which: int) -> int:
    return _WORD.size + which * _HEADER.size


class SentResponse(NamedTuple):
    """The part of a response that a frontend sent before it crashed.

    Attributes:
        has_begun: True if the client has the head of the response.
        has_ended: True if nothing follows `unsent`.
        unsent: Recorded bytes that are still to be sent.
        last_event_id: The ID of the last event, `unsent` included; "" if the response has not begun.
    """

    has_begun: bool
    has_ended: bool
    unsent: bytes
    last_event_id: str


def read_sent(
    memory_fd: int, slot: int, number: int, connection: socket.socket
) -> SentResponse | None:
    """Return the part of a response that was sent, from the memory of its frontend.

    Return None if that is not known, or if the slot has another record than the one with this number.

    Raises:
        OSError: The memory cannot be read, or the connection has ended.
    """
    data = os.pread(memory_fd, SLOT_BYTES, slot * SLOT_BYTES)
    [which] = _WORD.unpack_from(data)
    num, accepted, base, state, recorded = _HEADER.unpack_from(data, _header_at(which))
    if recorded != number or state == _UNKNOWN:
        return None
    num_accepted = count_accepted(connection)
    if state == _NONE:
        # A whole response is written at once, and then its connection is no longer kept.
        is_untouched = num_accepted == accepted
        return SentResponse(False, False, b"", "") if is_untouched else None
    at = num % TAIL_BYTES
    tail = data[_START:]
    tail = tail[:at] if num < TAIL_BYTES else tail[at:] + tail[:at]
    ids = _ID.findall(tail)
    has_ended = state == _ENDED
    sent = _NOTE.sub(b"", tail)
    num_unsent = base + num - num_accepted
    if not (ids or has_ended) or not 0 <= num_unsent <= min(len(sent), MAX_UNSENT):
        return None
    last_event_id = ids[-1].decode("ascii", "replace") if ids else ""
    return SentResponse(True, has_ended, sent[len(sent) - num_unsent :], last_event_id)
