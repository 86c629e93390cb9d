"""Skip these tests without a C++ compiler; with one, a missing native library is a failure."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from engine.workers.cpu.library import NotSupportedNatively, native_library

collect_ignore_glob: list[str] = []

try:
    native_library()
except NotSupportedNatively:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        collect_ignore_glob.append("test_*.py")


@pytest.fixture(autouse=True)
def best_isa_afterwards() -> Iterator[None]:
    yield
    # Imported here, because it needs the library.
    from support.workers.isas import BEST_ISA, select_isa

    select_isa(BEST_ISA)
