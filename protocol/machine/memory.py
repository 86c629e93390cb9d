"""Measure the memory of this machine, within the limits of this process and of its control groups."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from .control_groups import CGROUPS, control_groups

_PROC: Final = Path("/proc")
"""The kernel's information. The library psutil reads the same files, but its import would take 4 ms of a start."""

_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")
"""The file names of a control group's memory limit in versions 2 and 1. Version 1 uses a huge number for no limit."""


def total_bytes(cgroups: Path = CGROUPS) -> int:
    """Return the machine's memory in bytes, or the lowest limit of this process's control groups if that is smaller."""
    return _least(_of_machine("MemTotal"), _limit_of, cgroups)


def available_bytes(cgroups: Path = CGROUPS) -> int:
    """Return the free memory in bytes: the least that the machine, each control group and `ulimit -v` have left."""
    of_machine = min(_of_machine("MemAvailable"), _addresses_left())
    return _least(of_machine, _left_of, cgroups)


def _of_machine(name: str) -> int:
    """Return an amount of the machine's memory in bytes."""
    amounts = dict(line.split(":") for line in (_PROC / "meminfo").read_text().splitlines())
    return int(amounts[name].removesuffix("kB")) * 1024


def _addresses_left() -> int:
    """Return the bytes that this process may still allocate."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    num_pages = int((_PROC / "self/statm").read_text().split()[0])
    return max(0, limit - num_pages * os.sysconf("SC_PAGE_SIZE"))


def _least(of_machine: int, of_group: Callable[[Path], int], cgroups: Path) -> int:
    amounts = [of_machine]
    with suppress(OSError, ValueError):
        amounts += map(of_group, control_groups("memory", cgroups))
    return min(amounts)


def _limit_of(group: Path) -> int:
    for name in _LIMITS:
        if (group / name).exists():
            limit = (group / name).read_text().strip()
            return sys.maxsize if limit == "max" else int(limit)
    return sys.maxsize


def _left_of(group: Path) -> int:
    limit = _limit_of(group)
    if limit == sys.maxsize:
        return limit
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    is_v2 = (group / "memory.max").exists()
    used, prefix = ("memory.current", "") if is_v2 else ("memory.usage_in_bytes", "total_")
    # The page cache counts as used, but is freed when memory is needed.
    page_cache = sum(
        int(statistics.get(f"{prefix}{part}_file", 0)) for part in ("active", "inactive")
    )
    return max(0, limit - int((group / used).read_text()) + page_cache)
