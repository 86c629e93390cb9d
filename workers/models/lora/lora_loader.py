"""Load LoRA adapters in a thread while the worker executes steps."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

from ....protocol.errors import CheckpointError
from ....protocol.file_identity import LoraAdapter
from ....protocol.worker_messages import LoraLoad

_NICENESS: Final = 10
"""Niceness of the thread, with which it takes about a tenth of a CPU core that steps also use."""


class LoraLoader:
    """Loads adapters one after the other.

    The worker's own thread calls `install` between two steps.

    Args:
        load: Reads an adapter. Raises CheckpointError if it cannot be used.
        install: Gets a number and the result of `load`.
    """

    def __init__(
        self,
        load: Callable[[LoraAdapter], Any],
        install: Callable[[int, Any], None],
    ) -> None:
        self._load = load
        self._install = install
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._wanted: SimpleQueue[LoraLoad] = SimpleQueue()
        self._ended: deque[tuple[int, Any, str]] = deque()
        self._num_loading = 0
        self._num_signals = 0
        """Number of bytes that have not been read from the socket."""
        self._thread = threading.Thread(target=self._run, name="LoRA loader", daemon=True)

    @property
    def fd(self) -> int:
        """File descriptor that is readable once a load has ended."""
        return self._wake.fileno()

    @property
    def is_loading(self) -> bool:
        """True if a load was started whose answer has not been taken."""
        return self._num_loading > 0

    def begin(self, load: LoraLoad) -> None:
        """Start to load an adapter."""
        if self._thread.ident is None:
            self._thread.start()
        self._num_loading += 1
        self._wanted.put(load)

    def take_answers(self) -> list[tuple[int, str]]:
        """Install the adapters whose loads have ended. Return (number, error) for each; the error is "" on success."""
        answers = []
        while self._ended:
            number, loaded, error = self._take_ended()
            if not error:
                self._install(number, loaded)
            answers.append((number, error))
        if self._num_signals:
            with contextlib.suppress(BlockingIOError):
                self._num_signals -= len(self._wake.recv(self._num_signals))
        return answers

    def cancel(self) -> None:
        """Wait for the load in progress, then discard it and all queued loads, because another core takes over."""
        while self._num_loading:
            self._wake.setblocking(True)
            self._num_signals -= len(self._wake.recv(1))
            self._wake.setblocking(False)
            while self._ended:
                self._take_ended()

    def _take_ended(self) -> tuple[int, Any, str]:
        self._num_loading -= 1
        self._num_signals += 1
        return self._ended.popleft()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            wanted = self._wanted.get()
            loaded, error = None, ""
            try:
                loaded = self._load(wanted.adapter)
            except CheckpointError as problem:
                error = str(problem)
            except Exception as problem:
                error = f"{wanted.adapter.path}: the LoRA adapter cannot be loaded: {problem!r}"
            self._ended.append((wanted.number, loaded, error))
            self._waker.send(b"\0")
