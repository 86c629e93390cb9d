"""Threads for work that would block the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Final, TypeVar

from ..supervisor.parse_journal import ParseJournal

T = TypeVar("T")

ON_LOOP_CHARACTERS: Final = 2048
"""Texts up to this many characters are processed on the event loop, because a thread switch would take longer."""

LONG_CHARACTERS: Final = 64 * 1024
"""Texts with more characters are processed by separate threads, so that short texts never wait for them."""

NUM_THREADS: Final = 2
"""Number of threads for short work, and of further threads for long work."""

request_digest: ContextVar[bytes | None] = ContextVar("request_digest", default=None)
"""The digest of the request body that the current task handles, for the journal."""


class ThreadExecutor:
    """Runs functions in threads, to keep the event loop responsive.

    The `journal` records the request of each running function, so that a crash can be traced to it.

    Attributes:
        num_waiting_characters: Total size of unfinished long work.
    """

    def __init__(
        self, journal: ParseJournal | None = None, num_short_threads: int = NUM_THREADS
    ) -> None:
        self._journal = journal
        self._short = start_threads("short", num_short_threads)
        self._long = start_threads("long", NUM_THREADS)
        self.num_waiting_characters = 0

    def close(self) -> None:
        """Cancel waiting work and let the threads end."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    def create_separate(self, num_short_threads: int = NUM_THREADS) -> ThreadExecutor:
        """Return an executor with its own threads and the same journal, for work that must not delay other work."""
        return ThreadExecutor(self._journal, num_short_threads)

    async def run(self, size: int, function: Callable[..., T], *args: object) -> T:
        """Call `function`. Use a thread if processing `size` characters would block the event loop for too long."""
        if size <= ON_LOOP_CHARACTERS:
            return self.call(function, *args)
        if size <= LONG_CHARACTERS:
            return await self.in_thread(function, *args)
        self.num_waiting_characters += size
        try:
            return await self._run_in(self._long, function, *args)
        finally:
            self.num_waiting_characters -= size

    async def in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Call a short-running `function` in a thread."""
        return await self._run_in(self._short, function, *args)

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Call `function` on this thread and record it in the journal."""
        return self._call(request_digest.get(), function, *args)

    async def _run_in(
        self, threads: ThreadPoolExecutor, function: Callable[..., T], *args: object
    ) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            threads, self._call, request_digest.get(), function, *args
        )

    def _call(self, digest: bytes | None, function: Callable[..., T], *args: object) -> T:
        if digest is None or self._journal is None:
            return function(*args)
        slot = self._journal.begin_parsing(digest)
        try:
            return function(*args)
        finally:
            self._journal.end_parsing(slot)


def start_threads(kind: str, number: int) -> ThreadPoolExecutor:
    """Start all threads immediately, because it may be impossible later if memory is short."""
    threads = ThreadPoolExecutor(number, thread_name_prefix=f"{kind} work")
    all_run = threading.Barrier(number)
    for _ in range(number):
        threads.submit(all_run.wait)
    return threads
