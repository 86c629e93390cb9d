"""The number of threads that torch computes with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(device: torch.device, count: int) -> Iterator[None]:
    """A context in which torch uses `count` threads on a CPU.

    Afterwards the previous number applies again. It is usually 1, because more threads would compete with the threads
    of a native program.
    """
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
