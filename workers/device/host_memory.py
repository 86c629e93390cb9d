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
AHEAD_BYTES = 128 * 1024 * 1024
"""Bytes of all buffers together that are populated quickly beyond those in use."""

WARM_UP_BYTES = 128 * 1024
"""Bytes of each buffer that the warm-up of a server may use, on small pages."""

_MOVED_BYTES = 4 * HUGE_PAGE_BYTES
"""Bytes that `move_to_huge_pages` copies at once."""

_MREMAP_MAYMOVE_FIXED = 3
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), in Linux 5.14 and later."""
_MADV_COLLAPSE = 25
"""MADV_COLLAPSE of madvise(2), which makes a huge page of small ones, in Linux 6.1 and later."""


def allocate(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeros, uint8 [num_bytes], on huge pages."""
    memory = _map(num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:num_bytes]


def allocate_together(count: int, num_bytes: int) -> list[NDArray[np.uint8]]:
    """Return buffers of zeros, each uint8 [num_bytes], for a `Population`, which puts them on huge pages.

    Each starts at a small page.
    """
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = _map(count * size)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    return [whole[i * size :][:num_bytes] for i in range(count)]


def map_file(fd: int, num_bytes: int) -> NDArray[np.uint8]:
    """Return the first bytes of a file, uint8 [num_bytes]. Writing to them does not change the file.

    Raises:
        OSError: The file cannot be mapped.
        ValueError: It is shorter.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=access)
    return np.frombuffer(memory, np.uint8)


def move_to_huge_pages(buffer: NDArray[np.uint8]) -> None:
    """Replace the pages of a buffer by huge ones with the same content, as far as there is memory.

    Other threads may read the buffer meanwhile, but not write to it. The calling thread uses a quarter of a CPU core.
    """
    libc = ctypes.CDLL(None)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
    libc.mremap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 3, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    failed = ctypes.c_void_p(-1).value
    first = -(-buffer.ctypes.data // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (buffer.ctypes.data + len(buffer)) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    for target in range(first, end, _MOVED_BYTES):
        begin = time.perf_counter()
        size = min(_MOVED_BYTES, end - target)
        memory = libc.mmap(None, size + HUGE_PAGE_BYTES, access, flags, 2**64 - 1, 0)
        if memory == failed:
            return
        copy = -(-memory // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        is_moved = False
        if not libc.madvise(copy, size, _MADV_HUGEPAGE):
            ctypes.memmove(copy, target, size)
            is_moved = libc.mremap(copy, size, size, _MREMAP_MAYMOVE_FIXED, target) != failed
        # A range that was moved away may belong to another thread by now, so only what is around it is freed.
        libc.munmap(memory, copy - memory + (0 if is_moved else size))
        libc.munmap(copy + size, HUGE_PAGE_BYTES - (copy - memory))
        if not is_moved:
            return
        time.sleep(3 * (time.perf_counter() - begin))


def _map(num_bytes: int) -> mmap.mmap:
    size = max(1, -(-num_bytes // HUGE_PAGE_BYTES)) * HUGE_PAGE_BYTES
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Population:
    """Allocates the pages of buffers in a thread, the beginnings of all buffers first.

    Otherwise the first write to each page waits for its allocation. In a virtual machine whose host had to find the
    memory, 2 MiB took 9 ms. For all layers together, that would stop a server for a third of a second.

    The thread starts with the first use of more than `WARM_UP_BYTES`, because it would delay the start of a server.
    Until then, pages are small, so that the warm-up does not wait for a huge page of each layer. The thread uses a
    quarter of a CPU core until it is `AHEAD_BYTES` ahead of the pages in use, and then a hundredth.
    It has normal priority, because the last thread of an exiting process frees its memory: on a busy machine, a
    thread with idle priority delayed the end of a killed worker by half a minute.
    """

    def __init__(self, buffers: Sequence[NDArray[np.uint8]]) -> None:
        self._buffers = buffers
        self._ahead = max(AHEAD_BYTES // len(buffers), HUGE_PAGE_BYTES)
        self._wanted = self._ahead
        self._is_behind = threading.Event()
        self.thread = threading.Thread(target=self._run, name="populate", daemon=True)
        # Unlike `mmap.madvise`, this releases the interpreter lock.
        self._madvise = ctypes.CDLL(None).madvise

    def use(self, num_bytes: int) -> None:
        """Let the thread allocate pages beyond the first `num_bytes` of each buffer, which are about to be written."""
        if num_bytes <= WARM_UP_BYTES:
            return
        if self.thread.ident is None:
            self.thread.start()
        if num_bytes + self._ahead // 2 > self._wanted:
            self._wanted = num_bytes + self._ahead
            self._is_behind.set()

    def _run(self) -> None:
        addresses = [buffer.ctypes.data for buffer in self._buffers]
        for address, buffer in zip(addresses, self._buffers, strict=True):
            self._advise(address, len(buffer), _MADV_HUGEPAGE)
        for offset in range(0, max(len(buffer) for buffer in self._buffers), HUGE_PAGE_BYTES):
            for address, buffer in zip(addresses, self._buffers, strict=True):
                size = min(len(buffer) - offset, HUGE_PAGE_BYTES)
                if size <= 0:
                    continue
                begin = time.perf_counter()
                start = address + offset
                # Huge pages that have small ones already, and begin in the buffer before this one, if not in this one.
                aligned = max(start - start % HUGE_PAGE_BYTES, addresses[0])
                self._advise(aligned, start + size - aligned, _MADV_COLLAPSE)
                if self._advise(start, size, _MADV_POPULATE_WRITE):
                    # The kernel is older, or memory is short. The first write to each page will allocate it, or fail.
                    return
                self._rest(offset, time.perf_counter() - begin)

    def _advise(self, address: int, size: int, advice: int) -> bool:
        """Return whether the kernel did not take the advice."""
        return bool(self._madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice))

    def _rest(self, offset: int, worked_s: float) -> None:
        if offset >= self._wanted:
            self._is_behind.clear()
            # `use` may have been called before the event was cleared.
            if offset >= self._wanted and not self._is_behind.wait(99 * worked_s):
                return
        time.sleep(3 * worked_s)
