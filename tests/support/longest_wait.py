"""How long one client waits while another keeps a server busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


@contextmanager
def longest_wait(url: str) -> Iterator[list[float]]:
    """The longest time in seconds that another client waited for an answer meanwhile."""
    waits, is_over = [0.0], threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while not is_over.is_set():
                began = time.monotonic()
                client.get("/livez")
                waits[0] = max(waits[0], time.monotonic() - began)
                time.sleep(0.005)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield waits
    finally:
        is_over.set()
        thread.join()
