"""Measure the limits of the device, with which steps are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median duration of ten runs, after a run that is not counted."""
    times = []
    for _ in range(11):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def random_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return random data. A device copies and multiplies zeros faster than the numbers of a model."""
    return torch.empty(num_bytes // 8, dtype=torch.int64, device=device).random_().view(torch.uint8)


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return the bytes read and written per second by a copy on the device."""
    source = random_bytes(num_bytes, device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device)


def matmul_flops(device: torch.device, size: int) -> float:
    """Return the operations per second of a square bfloat16 product."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out), device)


def upload_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return the bytes per second of a copy from pinned memory to the device."""
    target = random_bytes(num_bytes, device)
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    source.copy_(target)
    return num_bytes / seconds(lambda: target.copy_(source, non_blocking=True), device)
