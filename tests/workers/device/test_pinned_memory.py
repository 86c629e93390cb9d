"""Registration of host memory with a simulated CUDA runtime."""

from __future__ import annotations

import ctypes
import gc
import mmap
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from engine.workers.device import host_memory
from engine.workers.device.pinned_memory import pin
from numpy.typing import NDArray

pytestmark = pytest.mark.slow

PAGE = mmap.PAGESIZE


class CudaError(IntEnum):
    success = 0
    out_of_memory = 2


class Runtime:
    """A runtime that registers memory as CUDA does: at most `limit` bytes at a time, and no page twice."""

    cudaError = CudaError

    def __init__(self) -> None:
        self.limit = 1 << 40
        self.num_left = 1 << 30
        self.ranges: dict[int, range] = {}
        self.pending: list[str] = []

    def cudaGetErrorString(self, error: CudaError) -> str:
        return error.name

    def cudaHostRegister(self, address: int, size: int, flags: int) -> CudaError:
        pages = range(address // PAGE, -(-(address + size) // PAGE))
        if size >= self.limit or not self.num_left:
            return CudaError.out_of_memory
        for other in self.ranges.values():
            taken = range(other.start // PAGE, -(-other.stop // PAGE))
            assert pages.stop <= taken.start or taken.stop <= pages.start
        self.num_left -= 1
        self.ranges[address] = range(address, address + size)
        return CudaError.success

    def cudaHostUnregister(self, address: int) -> CudaError:
        assert not self.pending
        # Accessing memory that is no longer mapped would end the process.
        assert ctypes.c_uint8.from_address(address).value == 7
        del self.ranges[address]
        return CudaError.success


@pytest.fixture
def runtime(monkeypatch) -> Runtime:
    fake = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "_cudart", fake)
    return fake


class Owner:
    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory


def pinned(runtime: Runtime, num_blocks: int, block_bytes: int) -> Owner:
    memory = host_memory.allocate(num_blocks * block_bytes)
    memory[:] = 7
    owner = Owner(memory)
    pin(memory, block_bytes, owner, runtime.pending.clear, registered_bytes=20 * PAGE)
    return owner


@pytest.mark.parametrize("block_bytes", [3 * PAGE, PAGE // 8, PAGE + PAGE // 2, 50 * PAGE])
def test_every_block_is_in_one_registration_of_a_limited_size(
    runtime: Runtime, block_bytes: int
) -> None:
    runtime.limit = max(20 * PAGE, block_bytes) + 1
    owner = pinned(runtime, 40, block_bytes)
    begin = owner.memory.ctypes.data
    assert sum(len(r) for r in runtime.ranges.values()) == owner.memory.nbytes
    for block in range(40):
        first = begin + block * block_bytes
        last = first + block_bytes - 1
        assert any(first in r and last in r for r in runtime.ranges.values())


def test_memory_is_unregistered_after_the_copies_and_before_unmapping(
    runtime: Runtime,
) -> None:
    owner = pinned(runtime, 40, PAGE)
    assert len(runtime.ranges) == 2
    runtime.pending.append("a copy")
    del owner
    gc.collect()
    assert not runtime.ranges


def test_registrations_before_an_error_are_undone(runtime: Runtime) -> None:
    runtime.num_left = 1

    def fail() -> Any:
        with pytest.raises(RuntimeError, match="out_of_memory"):
            pinned(runtime, 40, PAGE)

    fail()
    gc.collect()
    assert not runtime.ranges


def test_memory_is_unregistered_after_a_gpu_failure(runtime: Runtime) -> None:
    memory = host_memory.allocate(PAGE)
    memory[:] = 7

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    owner = Owner(memory)
    pin(memory, PAGE, owner, fail)
    assert runtime.ranges
    del owner, memory
    gc.collect()
    assert not runtime.ranges
