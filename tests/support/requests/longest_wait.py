"""Measure how long one client waits while another keeps a server busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import httpx
from support.processes.lost_time import lost_time_s

MAX_WAIT_S: Final = 0.25
"""The longest that a client may wait because of the requests of another."""

MAX_ATTEMPTS: Final = 5

T = TypeVar("T")


def assert_delays_nobody(url: str, pids: Collection[int], attack: Callable[[], T]) -> T:
    """Attack until no other client waits for long, and return what the attack returned.

    `pids` are the processes of the server at `url`. Other programs on the machine delay some attempts, but what the
    server itself causes delays all of them.
    """
    longest: list[float] = []
    while len(longest) < MAX_ATTEMPTS:
        with longest_wait(url, pids) as waits:
            answer = attack()
        if waits[0] < MAX_WAIT_S:
            return answer
        longest.append(waits[0])
    raise AssertionError(f"in each attempt another client waited too long, in seconds: {longest}")


@contextmanager
def longest_wait(url: str, pids: Collection[int]) -> Iterator[list[float]]:
    """Measure the longest time in seconds that another client waits for an answer in the context.

    Time in which the machine was busy with other programs does not count.
    """
    waits, is_over = [0.0], threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while not is_over.is_set():
                lost_s, began = lost_time_s(pids), time.monotonic()
                client.get("/livez")
                took_s = time.monotonic() - began
                waits[0] = max(waits[0], took_s - (lost_time_s(pids) - lost_s))
                time.sleep(0.005)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield waits
    finally:
        is_over.set()
        thread.join()
