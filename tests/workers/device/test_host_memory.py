from __future__ import annotations

import mmap

import numpy as np
import psutil
from engine.workers.device import host_memory

BYTES = 24 * 1024 * 1024


def test_populating_buffers_keeps_concurrent_writes() -> None:
    before = psutil.Process().memory_info().rss
    buffers = [host_memory.allocate(BYTES), host_memory.allocate(BYTES // 3 + 1)]
    assert psutil.Process().memory_info().rss < before + BYTES
    populating = host_memory.Population(buffers).thread
    for buffer in buffers:
        buffer[:: mmap.PAGESIZE] = 7
    populating.join()
    assert psutil.Process().memory_info().rss > before + BYTES
    for buffer in buffers:
        assert np.count_nonzero(buffer) == -(-len(buffer) // mmap.PAGESIZE)


def test_populating_allocates_pages_without_writes() -> None:
    buffer = host_memory.allocate(BYTES)
    before = psutil.Process().memory_info().rss
    host_memory.Population([buffer]).thread.join()
    assert psutil.Process().memory_info().rss > before + BYTES * 0.9
    assert not buffer.any()
