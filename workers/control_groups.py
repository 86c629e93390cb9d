"""The control groups (v2) whose limits hold for this process, as containers and service managers set them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")


def control_groups(root: Path = CGROUPS) -> tuple[Path, ...]:
    """The group that this process is in, then those around it. Raises OSError where there are none."""
    own = root / Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip().strip("/")
    return (own, *own.parents)
