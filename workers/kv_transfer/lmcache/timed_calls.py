"""Calls of another library that may never return."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

NUM_THREADS: Final = 6
"""One more than the threads that call: the readers and the writer."""


class TimedCalls:
    """Makes calls in threads that are discarded if a call does not return in time.

    The threads that the library starts inherit being daemons, so they do not keep the process from exiting.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for _ in range(NUM_THREADS):
            threading.Thread(target=self._run, name="LMCache call", daemon=True).start()

    def call(self, timeout_s: float, function: Callable[..., T], *args: Any) -> T:
        """Return the result of a call.

        Raises:
            TimeoutError: The call did not return within `timeout_s` seconds. It may still return later.
            Exception: The call raised it.
        """
        done = threading.Event()
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(function(*args))
            except Exception as error:
                errors.append(error)
            done.set()

        self._calls.put(run)
        if not done.wait(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        if errors:
            raise errors[0]
        return results[0]

    def _run(self) -> None:
        while True:
            self._calls.get()()
