"""Load LoRA adapters in a thread while the worker executes steps."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

from ....protocol.errors import NO_ADAPTER_MEMORY, CheckpointError
from ....protocol.file_identity import LoraAdapter
from ....protocol.worker_messages import LoraLoad
from ...device.waking_queue import WakingQueue

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
        self._wanted: SimpleQueue[LoraLoad] = SimpleQueue()
        self._ended: WakingQueue[tuple[LoraLoad, Any, str]] = WakingQueue()
        self._num_loading = 0
        self._thread = threading.Thread(target=self._run, name="LoRA loader", daemon=True)

    @property
    def fd(self) -> int:
        """File descriptor that is readable once a load has ended."""
        return self._ended.fd

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
        for wanted, loaded, error in self._ended.take():
            self._num_loading -= 1
            if not error:
                try:
                    self._install(wanted.number, loaded)
                except Exception as problem:
                    if not _is_out_of_memory(problem):
                        raise
                    error = _describe(wanted, problem)
            answers.append((wanted.number, error))
        return answers

    def cancel(self) -> None:
        """Wait for the load in progress, then discard it and all queued loads, because another core takes over."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        while self._num_loading:
            poller.poll()
            self._num_loading -= len(list(self._ended.take()))

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
                error = _describe(wanted, problem)
            self._ended.put((wanted, loaded, error))


def _is_out_of_memory(problem: Exception) -> bool:
    # torch raises RuntimeError if the CPU's memory does not suffice.
    signs = ("out of memory", "can't allocate memory", "not enough memory")
    is_of_torch = isinstance(problem, RuntimeError) and any(sign in str(problem) for sign in signs)
    return isinstance(problem, MemoryError) or is_of_torch


def _describe(wanted: LoraLoad, problem: Exception) -> str:
    path = wanted.adapter.path
    if _is_out_of_memory(problem):
        return f"{NO_ADAPTER_MEMORY} {path}; retry later, or serve fewer adapters (--max-cpu-loras)"
    return f"{path}: the LoRA adapter cannot be loaded: {problem!r}"
