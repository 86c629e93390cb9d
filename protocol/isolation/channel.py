"""Exchange messages with disposable processes, with large content in shared memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Self

import msgspec

from .messages import LENGTH_BYTES, frame


class SharedContent:
    """Content that came with a message, in a memory file that is read instead of mapped.

    If it were mapped, a sender could crash this process by truncating the file. A `with` block closes the file.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._offset = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Later calls do nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes. Raise EOFError if fewer bytes are left."""
        data = b"" if self._fd is None else os.pread(self._fd, size, self._offset)
        if len(data) != size:
            raise EOFError(f"the content ends {size - len(data)} bytes early")
        self._offset += size
        return data


def send(to: socket.socket, message: msgspec.Struct, content: Iterable[bytes | memoryview]) -> None:
    """Send a message and its content, if it has any. Raise OSError if the receiver has exited."""
    if content == ():
        to.sendall(frame(message))
        return
    fd = os.memfd_create("content")
    try:
        for part in content:
            rest = memoryview(part).cast("B")
            while rest:
                rest = rest[os.write(fd, rest) :]
        data = frame(message)
        sent = socket.send_fds(to, [data], [fd])
        to.sendall(memoryview(data)[sent:])
    finally:
        os.close(fd)


def receive(sender: socket.socket) -> tuple[bytes, SharedContent] | None:
    """Return an encoded message and its content; None if the sender has exited. Raise OSError after a timeout."""
    received, fds, _, _ = socket.recv_fds(sender, LENGTH_BYTES, 1)
    content = SharedContent(fds[0] if fds else None)
    try:
        header = received + _receive(sender, LENGTH_BYTES - len(received))
        size = int.from_bytes(header, "big")
        body = _receive(sender, size)
        if len(header) == LENGTH_BYTES and len(body) == size:
            return body, content
    except BaseException:
        content.close()
        raise
    content.close()
    return None


def _receive(sender: socket.socket, size: int) -> bytes:
    """Return `size` bytes, or fewer if the sender has exited."""
    received = bytearray()
    while len(received) < size and (piece := sender.recv(size - len(received))):
        received += piece
    return bytes(received)
