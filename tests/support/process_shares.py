"""Assignment of tests to the processes of `scripts/test`."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

FOLDERS_WITH_SERVERS = {"e2e", "chaos", "hostile"}


class ProcessShares(LoadScopeScheduling):
    """Gives each process one file after another, in the order of `sort_by_cost`."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        # Otherwise, files with many tests would come first.
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]


def sort_by_cost(items: list[pytest.Item]) -> None:
    """Sort files with servers first and quick ones last, so that all processes end at about the same time."""

    def cost(item: pytest.Item) -> int:
        if FOLDERS_WITH_SERVERS & set(item.path.parts):
            return 2
        return 1 if item.get_closest_marker("slow") else 0

    cost_by_file: dict[Any, int] = {}
    for item in items:
        cost_by_file[item.path] = max(cost_by_file.get(item.path, 0), cost(item))
    items.sort(key=lambda item: -cost_by_file[item.path])
