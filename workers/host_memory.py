"""Large host buffers on huge pages.

A model's weights and its KV cache are read end to end in every step; with pages of 2 MiB the processor's
address translation keeps up. Pages are zero, and take memory only once they are written.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

HUGE_PAGE_BYTES = 2 * 1024 * 1024


def allocate(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros uint8[num_bytes], rounded up to whole huge pages in memory."""
    size = max(1, -(-num_bytes // HUGE_PAGE_BYTES)) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:num_bytes]
