from __future__ import annotations

import mmap

import numpy as np
import psutil
from engine.workers.device import host_memory

BYTES = 24 * 1024 * 1024


def test_buffers_that_are_populated_together_keep_concurrent_writes_and_share_huge_pages() -> None:
    before = psutil.Process().memory_info().rss
    buffers = host_memory.allocate_together(16, BYTES // 16 + 1)
    assert psutil.Process().memory_info().rss < before + BYTES // 2
    population = host_memory.Population(buffers)
    population.use(BYTES)
    for buffer in buffers:
        buffer[:: mmap.PAGESIZE] = 7
    population.thread.join()
    # Of its own, each would take two huge pages, 64 MiB in all.
    assert before + BYTES < psutil.Process().memory_info().rss < before + BYTES * 3 // 2
    for buffer in buffers:
        assert np.count_nonzero(buffer) == -(-len(buffer) // mmap.PAGESIZE)


def test_a_warm_up_takes_small_pages_of_each_buffer() -> None:
    buffers = host_memory.allocate_together(8, host_memory.HUGE_PAGE_BYTES)
    population = host_memory.Population(buffers)
    before = psutil.Process().memory_info().rss
    population.use(host_memory.WARM_UP_BYTES)
    for buffer in buffers:
        buffer[: host_memory.WARM_UP_BYTES] = 7
    assert psutil.Process().memory_info().rss < before + 2 * host_memory.HUGE_PAGE_BYTES
    population.use(host_memory.WARM_UP_BYTES + 1)
    population.thread.join()
    assert all(np.count_nonzero(buffer) == host_memory.WARM_UP_BYTES for buffer in buffers)


def test_populating_begins_with_a_use_and_allocates_pages_without_writes() -> None:
    buffer = host_memory.allocate(BYTES)
    before = psutil.Process().memory_info().rss
    population = host_memory.Population([buffer])
    assert psutil.Process().memory_info().rss < before + BYTES // 2
    population.use(BYTES)
    population.thread.join()
    assert psutil.Process().memory_info().rss > before + BYTES * 0.9
    assert not buffer.any()
