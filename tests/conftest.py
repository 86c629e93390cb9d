import sys
from pathlib import Path

import pytest
from hypothesis import settings

# So that any test can say `from support.… import …`.
sys.path.insert(0, str(Path(__file__).parent))

from support.triton_interpreter import interpret_without_gpu

# Triton looks once, and much of torch loads it.
interpret_without_gpu()

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

SERVERS = {"chaos", "e2e"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files are shared out to processes; those with servers go to one, for their servers have time limits."""
    for item in items:
        folder = item.path.parent.name
        group = "servers" if folder in SERVERS else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
