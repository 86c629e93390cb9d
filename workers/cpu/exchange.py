"""Memory that the tensor-parallel ranks on one machine share, for `csrc/runtime/exchange.h`."""

from __future__ import annotations

import mmap
import os
import secrets
import uuid
from pathlib import Path

import torch

from ..layers.parallel.tensor_parallel import TensorParallel
from .library import NotSupportedNatively


def share_memory(tensor_parallel: TensorParallel, num_bytes: int) -> mmap.mmap:
    """Return zeroed memory that all ranks of a tensor-parallel group map. It is freed with its last mapping.

    Raises:
        NotSupportedNatively: The ranks cannot share memory. This is raised on every rank.
    """
    fd = -1
    if tensor_parallel.rank == 0 and hasattr(os, "memfd_create"):
        fd = os.memfd_create("engine-exchange")
        os.ftruncate(fd, num_bytes)
    try:
        own = torch.tensor([os.getpid(), fd, _machine_id()])
        pids, fds, machines = tensor_parallel.stack(own).T.tolist()
        memory = None
        if len(set(machines)) == 1 and fds[0] >= 0:
            memory = _map(f"/proc/{pids[0]}/fd/{fds[0]}", num_bytes)
        # The descriptor can be closed once all ranks have tried to map the memory. If one has failed, no rank uses it.
        has_mapped = tensor_parallel.stack(torch.tensor([memory is not None]))
    finally:
        if fd >= 0:
            os.close(fd)
    if memory is None or not has_mapped.all():
        raise NotSupportedNatively(
            f"the {tensor_parallel.size} workers of --tensor-parallel-size cannot share memory"
        )
    return memory


def _map(path: str, num_bytes: int) -> mmap.mmap | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return mmap.mmap(fd, num_bytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def _machine_id() -> int:
    """Return a number that is equal for processes that see each other in /proc, and different otherwise."""
    try:
        boot = uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        return (boot.int ^ os.stat("/proc/self/ns/pid").st_ino) % 2**63
    except (OSError, ValueError):
        return secrets.randbits(63)
