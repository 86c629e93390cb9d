"""The checks of `engine doctor`: settings of this machine that make servers slow or make them fail."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from ...cache_directory import cache_directory
from ...supervisor.console import format_bytes
from ..arguments import unread_variables

MIN_DESCRIPTORS: Final = 8192
MIN_SHM_BYTES: Final = 1 << 30
MIN_CACHE_BYTES: Final = 5 << 30


class Check(msgspec.Struct):
    """The result of a check.

    Attributes:
        name: The name of the setting that was checked.
        is_good: True if the setting is good.
        value: The setting that was found.
        advice: The change to make; empty if there is none.
    """

    name: str
    is_good: bool
    value: str
    advice: str = ""


def run_checks(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Yield the results of all checks that apply to this machine.

    Args:
        root: The directory that contains /proc, /sys and /dev.
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
    advice = (
        "each connection needs a descriptor; raise the hard limit (ulimit -Hn) to "
        f"{MIN_DESCRIPTORS}"
    )
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
    """Check the CPU limit of a container.

    When the threads have used up a period's time, the kernel stops all of them until the next period.
    """
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    if quota == "max":
        return None
    cores = int(quota) / int(period)
    if cores == int(cores):
        return Check("CPU limit", True, f"{cores:g} cores")
    advice = "only whole cores are used; set the CPU limit of the container to a whole number"
    return Check("CPU limit", False, f"{cores:g} cores", advice)


def _huge_pages(root: Path, environ: Mapping[str, str]) -> Check | None:
    chosen = _chosen(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if chosen is None:
        return None
    advice = (
        "large pages make reading weights faster; run echo madvise > "
        "/sys/kernel/mm/transparent_hugepage/enabled"
    )
    return _good_unless("huge pages", chosen, ("never",), advice)


def _governor(root: Path, environ: Mapping[str, str]) -> Check | None:
    try:
        governor = (root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text()
    except OSError:
        return None
    advice = (
        "the processor lowers its frequency between steps; run cpupower frequency-set -g "
        "performance"
    )
    return _good_unless("CPU governor", governor.strip(), ("powersave", "conservative"), advice)


def _spinning(root: Path, environ: Mapping[str, str]) -> Check | None:
    """Check for OpenMP threads that spin while they wait, because they slow down the native kernels' threads."""
    spins = {
        "OMP_WAIT_POLICY": ("active", "ACTIVE"),
        "KMP_BLOCKTIME": ("infinite", "INFINITE"),
        "GOMP_SPINCOUNT": ("infinite", "INFINITE", "infinity"),
    }
    for name, values in spins.items():
        if environ.get(name) in values:
            return Check(
                "OpenMP",
                False,
                f"{name}={environ[name]}",
                f"unset {name}, because it makes idle OpenMP threads spin",
            )
    return None


def _omp_threads(root: Path, environ: Mapping[str, str]) -> Check | None:
    text = environ.get("OMP_NUM_THREADS", "")
    cores = os.cpu_count() or 1
    if not text.isdigit() or int(text) <= cores:
        return None
    advice = f"unset it, because there are only {cores} processors"
    return Check("OMP_NUM_THREADS", False, text, advice)


def _variables(root: Path, environ: Mapping[str, str]) -> Check | None:
    unread = unread_variables(environ)
    if not unread:
        return None
    return Check(
        "environment",
        False,
        ", ".join(unread),
        "unset these variables, because they have no effect",
    )


def _cache(root: Path, environ: Mapping[str, str]) -> Check:
    path = cache_directory("models")
    existing = next(p for p in (path, *path.parents) if os.path.exists(p))
    free = shutil.disk_usage(existing).free
    value = f"{path}, {format_bytes(free)} free"
    if not os.access(existing, os.W_OK):
        return Check("cache", False, value, "not writable; set ENGINE_CACHE to a directory that is")
    if free < MIN_CACHE_BYTES:
        return Check(
            "cache", False, value, "too little space for models; engine models rm removes some"
        )
    return Check("cache", True, value)


def _good_unless(name: str, value: str, bad: tuple[str, ...], advice: str) -> Check:
    is_good = value not in bad
    return Check(name, is_good, value, "" if is_good else advice)


def _chosen(path: Path) -> str | None:
    """Return the selected value (in brackets) of a file such as `always [madvise] never`."""
    try:
        _, _, rest = path.read_text().partition("[")
    except OSError:
        return None
    return rest.partition("]")[0] or None
