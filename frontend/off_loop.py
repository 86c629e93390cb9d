"""Work that would hold up the event loop, done in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

ON_LOOP_CHARACTERS: Final = 2048
"""Up to this size, texts are handled on the event loop: a thread switch would cost more."""

_NUM_THREADS: Final = 2


class OffLoop:
    """The threads in which one frontend does such work."""

    def __init__(self) -> None:
        self._threads = _start_threads()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, size: int, function: Callable[..., T], *args: object) -> T:
        """Call `function`, in a thread if work on `size` characters would hold up the event loop."""
        if size <= ON_LOOP_CHARACTERS:
            return function(*args)
        return await self.in_thread(function, *args)

    async def in_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def _start_threads() -> ThreadPoolExecutor:
    """All threads start at once: where memory is limited, none may be had later."""
    threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")
    all_run = threading.Barrier(_NUM_THREADS)
    for _ in range(_NUM_THREADS):
        threads.submit(all_run.wait)
    return threads
