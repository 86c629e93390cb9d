"""Clients of a server that work at the same time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def run_clients(send: Callable[[T], R], shares: Sequence[T]) -> tuple[float, list[R]]:
    """Call `send` with each share, in threads that begin together. Return the seconds, and the results in order."""
    with ThreadPoolExecutor(len(shares)) as pool:
        start = time.perf_counter()
        results = list(pool.map(send, shares))
        return time.perf_counter() - start, results


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
