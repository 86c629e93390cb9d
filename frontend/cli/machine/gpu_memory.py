"""The memory of this machine's GPUs, read from NVIDIA's management library."""

from __future__ import annotations

import ctypes

_LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def smallest_gpu_memory() -> int:
    """Return the bytes of the GPU with the least memory; 0 if that is unknown."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return 0
    if library.nvmlInit_v2():
        return 0
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return 0
        return min((_memory(library, index) for index in range(count.value)), default=0)
    finally:
        library.nvmlShutdown()


def _memory(library: ctypes.CDLL, index: int) -> int:
    device, memory = ctypes.c_void_p(), _Memory()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
        return 0
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return 0
    return int(memory.total)
