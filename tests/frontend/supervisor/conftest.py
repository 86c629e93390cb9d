"""The directory of a supervisor's sockets and files."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    yield str(path)
