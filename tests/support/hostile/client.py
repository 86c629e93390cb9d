"""An HTTP client for attacks, which sends any bytes while it reads the answer."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

RECEIVE_BYTES: Final = 1 << 18
SMALL_BYTES: Final = 1 << 16
ANSWER_TIMEOUT_S: Final = 60.0


@dataclass(slots=True)
class Answer:
    """`status` is 0 if the connection ended without an answer; `error` says how it ended."""

    status: int
    headers: dict[str, str]
    body: bytes
    error: str = ""
    is_closed: bool = False

    @property
    def json(self) -> Any:
        """The body, which must be JSON without NaN or infinity."""
        return json.loads(self.body, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class HTTPClient:
    """One connection at a time to `address`, kept open between requests while the server allows it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def post(self, path: str, body: bytes, headers: Iterable[str] = ()) -> Answer:
        """Send a JSON body. A connection that the server has closed meanwhile is opened again."""
        return self.send(make_request("POST", path, body, headers))

    def send(self, request: bytes) -> Answer:
        was_open = self._socket is not None
        answer = self._exchange(request)
        if was_open and not answer.status:
            answer = self._exchange(request)
        return answer

    def _exchange(self, request: bytes) -> Answer:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, ANSWER_TIMEOUT_S)
        answer = exchange(self._socket, request)
        if answer.is_closed:
            self.close()
        return answer


def make_request(method: str, path: str, body: bytes, headers: Iterable[str] = ()) -> bytes:
    fields = ["host: localhost", f"content-length: {len(body)}", *headers]
    if not any(field.lower().startswith("content-type:") for field in fields):
        fields.append("content-type: application/json")
    head = "\r\n".join([f"{method} {path} HTTP/1.1", *fields]) + "\r\n\r\n"
    return head.encode("latin-1") + body


def exchange(
    connection: socket.socket, request: bytes, timeout_s: float = ANSWER_TIMEOUT_S
) -> Answer:
    """Send `request` and read one answer at the same time, so that an early answer is not lost."""
    if len(request) <= SMALL_BYTES:
        # It fits into the socket's buffer, and is sent at once.
        connection.settimeout(timeout_s)
        try:
            connection.sendall(request)
        except OSError as failure:
            return Answer(0, {}, b"", repr(failure), is_closed=True)
        request = b""
    connection.setblocking(False)
    to_send, received, error = memoryview(request), bytearray(), ""
    deadline = time.monotonic() + timeout_s
    while (answer := parse_answer(received)) is None:
        writers = [connection] if to_send else []
        timeout = max(deadline - time.monotonic(), 0)
        readable, writable, _ = select.select([connection], writers, [], timeout)
        if not readable and not writable:
            error = f"no answer in {timeout_s:.0f} s"
            break
        try:
            if readable:
                data = connection.recv(RECEIVE_BYTES)
                if not data:
                    error = "the connection was closed"
                    break
                received += data
            else:
                to_send = to_send[connection.send(to_send[:RECEIVE_BYTES]) :]
        except BlockingIOError:
            continue
        except BrokenPipeError:
            # The answer may still be there to read.
            to_send = memoryview(b"")
        except ConnectionResetError as failure:
            error = repr(failure)
            break
    connection.settimeout(timeout_s)
    if answer is None:
        answer = parse_answer(received, is_complete=True) if error.startswith("the conn") else None
        if answer is None:
            return Answer(0, {}, bytes(received), error, is_closed=True)
        answer.is_closed = True
    if to_send or answer.headers.get("connection", "").lower() == "close":
        answer.is_closed = True
    return answer


def parse_answer(data: bytearray, is_complete: bool = False) -> Answer | None:
    """Return the answer that `data` begins with; None while it is incomplete."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    status_line, *fields = data[:end].decode("latin-1").split("\r\n")
    headers = {}
    for field in fields:
        name, _, value = field.partition(":")
        headers[name.lower()] = value.strip()
    status = int(status_line.split(" ")[1])
    start = end + 4
    if 100 <= status < 200:
        return parse_answer(data[start:], is_complete)
    # A body is copied once, when it is complete: a client that is slow to read is cut off.
    if "content-length" in headers:
        stop = start + int(headers["content-length"])
        return Answer(status, headers, bytes(data[start:stop])) if len(data) >= stop else None
    if headers.get("transfer-encoding") == "chunked":
        if not data.endswith(b"0\r\n\r\n"):
            return None
        return Answer(status, headers, _decode_chunks(data[start:]))
    return Answer(status, headers, bytes(data[start:])) if is_complete else None


def _decode_chunks(data: bytearray) -> bytes:
    parts, position = [], 0
    while True:
        end = data.find(b"\r\n", position)
        size = int(data[position:end], 16)
        if not size:
            return b"".join(parts)
        position = end + 2 + size
        parts.append(bytes(data[end + 2 : position]))
        position += 2
