"""Waiting for a device and for messages at once, where a poll knows of file descriptors only."""

from __future__ import annotations

import contextlib
import socket
import threading
from queue import SimpleQueue

from .runner import PendingOutput


class DeviceWatch:
    """A thread that waits for outputs, one at a time, while the worker sleeps in a poll.

    It is given an output only when the worker has nothing else to do, so that the two threads seldom want the
    interpreter at once.
    """

    def __init__(self) -> None:
        self._wake, self._waker = socket.socketpair()
        self._outputs: SimpleQueue[PendingOutput] = SimpleQueue()
        self._watched: PendingOutput | None = None
        self._thread = threading.Thread(target=self._wait, name="device watch", daemon=True)

    @property
    def fd(self) -> int:
        """Readable once the watched output is there."""
        return self._wake.fileno()

    def watch(self, output: PendingOutput) -> None:
        if output is self._watched:
            return
        # Not started before: on a CPU outputs are there at once, and none is ever watched.
        if self._thread.ident is None:
            self._thread.start()
        self._watched = output
        self._outputs.put(output)

    def clear(self) -> None:
        """Take note that `fd` was readable."""
        self._wake.recv(64)
        self._watched = None

    def _wait(self) -> None:
        while True:
            # An error of the device is raised in the worker, too, when it asks for the output.
            with contextlib.suppress(Exception):
                self._outputs.get().wait()
            self._waker.send(b"\0")
