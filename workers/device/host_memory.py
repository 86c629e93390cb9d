"""Large host buffers on huge pages.

Every step reads a model's weights and KV cache from end to end. With pages of 2 MiB, address translation keeps up.
Pages are zero and take memory only once they are written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_POPULATE_WRITE = 23
"""From madvise(2), Linux 5.14 and later."""


def allocate(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeros, uint8 [num_bytes], in whole huge pages."""
    size = max(1, -(-num_bytes // HUGE_PAGE_BYTES)) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:num_bytes]


def populate(buffers: Sequence[NDArray[np.uint8]]) -> threading.Thread:
    """Allocate the pages of buffers in a thread of idle priority, the beginnings of all buffers first.

    Otherwise the first write to each page waits for its allocation. In a virtual machine whose host had to find the
    memory, 2 MiB took 9 ms; for all layers at once this would stop a server for a third of a second.
    """
    thread = threading.Thread(target=_populate, args=(buffers,), name="populate", daemon=True)
    thread.start()
    return thread


def _populate(buffers: Sequence[NDArray[np.uint8]]) -> None:
    if not hasattr(os, "SCHED_IDLE"):
        return
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Unlike `mmap.madvise`, this releases the interpreter lock.
    madvise = ctypes.CDLL(None).madvise
    for offset in range(0, max(len(buffer) for buffer in buffers), HUGE_PAGE_BYTES):
        for buffer in buffers:
            size = min(len(buffer) - offset, HUGE_PAGE_BYTES)
            begin = ctypes.c_void_p(buffer.ctypes.data + offset)
            if size > 0 and madvise(begin, ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                # The kernel is older, or memory is short. The first write to each page allocates it, or fails.
                return
