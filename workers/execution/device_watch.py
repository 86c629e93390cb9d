"""Wake a poll when a device has finished a step, because a poll can only wait for file descriptors."""

from __future__ import annotations

import contextlib
import socket
import threading
from queue import SimpleQueue

from .runner import PendingOutput


class DeviceWatch:
    """A thread that waits for one output at a time while the worker sleeps in a poll.

    The worker passes it an output only when it has nothing else to do, so that the two threads rarely need the
    interpreter at the same time.
    """

    def __init__(self) -> None:
        self._wake, self._waker = socket.socketpair()
        self._outputs: SimpleQueue[PendingOutput] = SimpleQueue()
        self._watched: PendingOutput | None = None
        self._thread = threading.Thread(target=self._wait, name="device watch", daemon=True)

    @property
    def fd(self) -> int:
        """File descriptor that is readable once the watched output is ready."""
        return self._wake.fileno()

    def watch_output(self, output: PendingOutput) -> None:
        """Wait for an output in the thread, unless the thread is already waiting for it."""
        if output is self._watched:
            return
        # The thread starts with the first pending output. On a CPU, outputs are never pending.
        if self._thread.ident is None:
            self._thread.start()
        self._watched = output
        self._outputs.put(output)

    def clear(self) -> None:
        """Make `fd` unreadable until the next output is ready."""
        self._wake.recv(64)
        self._watched = None

    def _wait(self) -> None:
        while True:
            # If the device failed, the worker gets the error when it reads the output.
            with contextlib.suppress(Exception):
                self._outputs.get().wait()
            self._waker.send(b"\0")
