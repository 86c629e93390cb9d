"""Large host buffers on huge pages.

Every step reads the model's weights and KV cache from end to end. With pages of 2 MiB, address translation does not
slow this down. Pages are zero, and take memory only once they are written.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), in Linux 5.14 and later."""


def allocate(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeros, uint8 [num_bytes], on huge pages."""
    size = max(1, -(-num_bytes // HUGE_PAGE_BYTES)) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:num_bytes]


def populate(buffers: Sequence[NDArray[np.uint8]]) -> threading.Thread:
    """Allocate the pages of buffers in a thread, the beginnings of all buffers first.

    Otherwise the first write to each page waits for its allocation. In a virtual machine whose host had to find the
    memory, 2 MiB took 9 ms. For all layers together, that would stop a server for a third of a second.

    The thread uses a quarter of a CPU core. It has normal priority, because the last thread of an exiting process frees
    its memory: on a busy machine, a thread with idle priority delayed the end of a killed worker by half a minute.
    """
    thread = threading.Thread(target=_populate, args=(buffers,), name="populate", daemon=True)
    thread.start()
    return thread


def _populate(buffers: Sequence[NDArray[np.uint8]]) -> None:
    # Unlike `mmap.madvise`, this releases the interpreter lock.
    madvise = ctypes.CDLL(None).madvise
    for offset in range(0, max(len(buffer) for buffer in buffers), HUGE_PAGE_BYTES):
        for buffer in buffers:
            size = min(len(buffer) - offset, HUGE_PAGE_BYTES)
            if size <= 0:
                continue
            begin = time.perf_counter()
            address = ctypes.c_void_p(buffer.ctypes.data + offset)
            if madvise(address, ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                # The kernel is older, or memory is short. The first write to each page will allocate it, or fail.
                return
            time.sleep(3 * (time.perf_counter() - begin))
