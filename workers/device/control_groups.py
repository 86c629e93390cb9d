"""The control groups whose limits hold for this process, as containers and service managers set them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")


def control_groups(controller: str, root: Path = CGROUPS) -> tuple[Path, ...]:
    """The groups that this process is in and those around them.

    They are of version 2, and of a `controller`'s own tree in version 1. Not all of them need be there.
    Raises OSError where there are none.
    """
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path.strip("/"))
    groups = (root / own.get("", ""), root / controller / own.get(controller, ""))
    return tuple(around for group in groups for around in (group, *group.parents))
