"""The control groups (cgroups) that limit this process, as set by containers and service managers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")


def control_groups(controller: str, root: Path = CGROUPS) -> tuple[Path, ...]:
    """Return the control groups of this process and all groups that contain them.

    They include those of version 2 and those of `controller`'s tree in version 1. Some of them may not exist.

    Raises:
        OSError: The system has no control groups.
    """
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path.strip("/"))
    groups = (root / own.get("", ""), root / controller / own.get(controller, ""))
    return tuple(around for group in groups for around in (group, *group.parents))
