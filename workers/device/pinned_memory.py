"""Pin host memory, so that a GPU can copy it directly."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

REGISTERED_BYTES: Final = 64 << 30
"""Number of bytes that are registered at once.

Drivers from R580 on refuse 512 GiB (NVIDIA/open-gpu-kernel-modules#1234).
"""


def pin(
    memory: NDArray[np.uint8],
    block_bytes: int,
    owner: object,
    wait_for_copies: Callable[[], object],
    registered_bytes: int = REGISTERED_BYTES,
) -> None:
    """Register the memory of blocks, and keep it mapped as long as `owner` exists.

    The memory must begin at a page boundary. A copy must not cross from one registration to the next, and the driver
    refuses to register a page twice. So each registration consists of whole blocks and whole pages.
    """
    unit = math.lcm(block_bytes, mmap.PAGESIZE)
    step = max(1, registered_bytes // unit) * unit
    # torch's allocator of pinned memory would round the size up to a power of two.
    register = torch.cuda.cudart().cudaHostRegister
    registered: list[int] = []
    weakref.finalize(owner, _unpin, memory, registered, wait_for_copies)
    for start in range(0, memory.nbytes, step):
        address = memory.ctypes.data + start
        torch.cuda.check_error(register(address, min(step, memory.nbytes - start), 0))
        registered.append(address)


def _unpin(
    memory: NDArray[np.uint8], registered: list[int], wait_for_copies: Callable[[], object]
) -> None:
    """Unregister the memory. `memory` is an argument so that it stays mapped until then."""
    # If the GPU has failed, it does not copy anymore.
    with suppress(RuntimeError):
        wait_for_copies()
    unregister = torch.cuda.cudart().cudaHostUnregister
    for address in registered:
        unregister(address)
