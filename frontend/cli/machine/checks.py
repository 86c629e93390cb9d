"""Checks of this machine's settings that make servers slow or make them fail."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from ....protocol.cache_directory import cache_directory
from ...supervisor.console import format_bytes
from ..arguments import unread_variables

MIN_DESCRIPTORS: Final = 8192
MIN_SHM_BYTES: Final = 1 << 30
MIN_CACHE_BYTES: Final = 5 << 30


class Check(msgspec.Struct):
    """The result of a check.

    Attributes:
        name: What was checked.
        is_good: Whether nothing has to be done.
        value: What was found.
        advice: What to do; "" if nothing.
    """

    name: str
    is_good: bool
    value: str
    advice: str = ""


def run_checks(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Yield the results of all checks that this machine has something to check for.

    Args:
        root: The directory of the files in /proc, /sys and /dev.
        environ: The environment of the server.
    """
    checks: tuple[Callable[[Path, Mapping[str, str]], Check | None], ...] = (
        _descriptors,
        _shared_memory,
        _control_group,
        _huge_pages,
        _governor,
        _spinning,
        _omp_threads,
        _variables,
        _cache,
    )
    for check in checks:
        result = check(root, environ)
        if result is not None:
            yield result


def _descriptors(root: Path, environ: Mapping[str, str]) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{hard} (soft limit {soft}, which engine serve raises)"
    if hard == resource.RLIM_INFINITY or hard >= MIN_DESCRIPTORS:
        return Check("open files", True, value)
    advice = f"each connection is a file; raise the hard limit (ulimit -Hn) to {MIN_DESCRIPTORS}"
    return Check("open files", False, value, advice)


def _shared_memory(root: Path, environ: Mapping[str, str]) -> Check | None:
    path = root / "dev/shm"
    if not path.is_dir():
        return None
    total = shutil.disk_usage(path).total
    if total >= MIN_SHM_BYTES:
        return Check("/dev/shm", True, format_bytes(total))
    advice = "too small for several workers; in a container, use --shm-size 1g or --ipc host"
    return Check("/dev/shm", False, format_bytes(total), advice)


def _control_group(root: Path, environ: Mapping[str, str]) -> Check | None:
    """Check the CPU limit of a container. The kernel stops all threads for the rest of a period when it is used up."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    if quota == "max":
        return None
    cores = int(quota) / int(period)
    if cores == int(cores):
        return Check("CPU limit", True, f"{cores:g} cores")
    advice = "only whole cores are used; set the limit of the container to a whole number"
    return Check("CPU limit", False, f"{cores:g} cores", advice)


def _huge_pages(root: Path, environ: Mapping[str, str]) -> Check | None:
    chosen = _chosen(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if chosen is None:
        return None
    advice = "weights are read faster with large pages: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return _good_unless("huge pages", chosen, ("never",), advice)


def _governor(root: Path, environ: Mapping[str, str]) -> Check | None:
    try:
        governor = (root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text()
    except OSError:
        return None
    advice = "the processor is slow between steps: cpupower frequency-set -g performance"
    return _good_unless("CPU governor", governor.strip(), ("powersave", "conservative"), advice)


def _spinning(root: Path, environ: Mapping[str, str]) -> Check | None:
    """Check for OpenMP threads that spin while they wait, and so slow down the threads of the native kernels."""
    spins = {
        "OMP_WAIT_POLICY": ("active", "ACTIVE"),
        "KMP_BLOCKTIME": ("infinite", "INFINITE"),
        "GOMP_SPINCOUNT": ("infinite", "INFINITE", "infinity"),
    }
    for name, values in spins.items():
        if environ.get(name) in values:
            return Check(
                "OpenMP", False, f"{name}={environ[name]}", f"unset {name}: its threads spin"
            )
    return None


def _omp_threads(root: Path, environ: Mapping[str, str]) -> Check | None:
    text = environ.get("OMP_NUM_THREADS", "")
    cores = os.cpu_count() or 1
    if not text.isdigit() or int(text) <= cores:
        return None
    advice = f"there are only {cores} processors; unset it"
    return Check("OMP_NUM_THREADS", False, text, advice)


def _variables(root: Path, environ: Mapping[str, str]) -> Check | None:
    unread = unread_variables(environ)
    if not unread:
        return None
    return Check(
        "environment", False, ", ".join(unread), "these variables have no effect; unset them"
    )


def _cache(root: Path, environ: Mapping[str, str]) -> Check:
    path = cache_directory("models")
    existing = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    value = f"{path}, {format_bytes(free)} free"
    if not os.access(existing, os.W_OK):
        return Check("cache", False, value, "not writable; set ENGINE_CACHE to a directory that is")
    if free < MIN_CACHE_BYTES:
        return Check("cache", False, value, "little space for models; see engine models")
    return Check("cache", True, value)


def _good_unless(name: str, value: str, bad: tuple[str, ...], advice: str) -> Check:
    is_good = value not in bad
    return Check(name, is_good, value, "" if is_good else advice)


def _chosen(path: Path) -> str | None:
    """Return the chosen value of a file such as `always [madvise] never`."""
    try:
        _, _, rest = path.read_text().partition("[")
    except OSError:
        return None
    return rest.partition("]")[0] or None
