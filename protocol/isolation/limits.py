"""Limit the memory and the time that a process may take for one piece of work."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator


def limit_memory(max_bytes: int) -> None:
    """Limit the data memory of this process to `max_bytes` bytes more than it has now, and disable core dumps.

    The soft limit on the address space is raised to the hard limit, so that only the limit on data applies.
    """
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, StopIteration, ValueError):
        with open("/proc/self/status") as status:
            size = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (size + max_bytes,) * 2)


@contextlib.contextmanager
def limit_time(cpu_s: float, wall_s: float = 0.0) -> Iterator[None]:
    """Let the kernel kill this process if the block takes longer, even inside a native library.

    The signal is SIGPROF for CPU time and SIGALRM for elapsed time. A limit of 0 seconds means none.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
