"""Find the control groups (cgroups) that limit this process. Containers and service managers set them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")


def control_groups(controller: str, root: Path = CGROUPS) -> tuple[Path, ...]:
    """Return the paths of the control groups that limit this process: its own and all that contain it.

    They include those of version 2, and those in the tree of `controller` in version 1. Some of the paths may not
    exist.

    Raises:
        OSError: The system has no control groups.
    """
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path.strip("/"))
    groups = (root / own.get("", ""), root / controller / own.get(controller, ""))
    return tuple(around for group in groups for around in (group, *group.parents))
