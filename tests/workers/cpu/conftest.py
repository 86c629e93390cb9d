from __future__ import annotations

import shutil

import pytest
from engine.workers.cpu.library import NotSupportedNatively, native_library


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a C++ compiler there is nothing to test; with one, a missing library is a failure."""
    try:
        native_library()
    except NotSupportedNatively as reason:
        if shutil.which("c++") is None and shutil.which("g++") is None:
            for item in items:
                if "tests/workers/cpu" in str(item.path):
                    item.add_marker(pytest.mark.skip(reason=str(reason)))
