import ast
import gc
import os
import ssl
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

# Garbage collections would take a fifth of the time to import all tests and their libraries, and free nothing.
gc.disable()

# This allows any test to use `from support.… import …`.
sys.path.insert(0, str(Path(__file__).parent))

# Recompiling the package would take half of the start time of each server that a test starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from support.gpu.triton_interpreter import interpret_without_gpu  # noqa: E402

# Else each client of httpx or openai would load all certificates of the system, which takes 40 ms.
ssl.create_default_context = cache(ssl.create_default_context)

pytest_plugins = ["support.suite.forked_processes", "support.suite.sampled_cases", "pytester"]

# Triton reads this only once, and many parts of torch load Triton.
interpret_without_gpu()

# `--hypothesis-profile=fast`, as in `scripts/test --fast`, tries a tenth of the examples of
# `--hypothesis-profile=nightly`, and the default three tenths.
settings.register_profile("nightly", deadline=None)
settings.register_profile("full", deadline=None, max_examples=30)
settings.register_profile("fast", deadline=None, max_examples=10)
settings.load_profile("full")

MARKER_OF_FOLDER = {"e2e": "e2e", "chaos": "chaos", "hostile": "chaos"}
"""All other folders hold unit tests."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m "not slow"`, do not even import files that are marked as slow, which takes as long as all fast tests."""
    if collection_path.suffix != ".py" or "not slow" not in config.option.markexpr:
        return None
    text = collection_path.read_text()
    if "mark.slow" not in text:
        return None
    return (
        any(
            "slow" in ast.unparse(line.value)
            for line in ast.parse(text).body
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "pytestmark"
        )
        or None
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Enable garbage collections once all tests are imported; they do not look at what exists by then."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test as `unit`, `e2e` or `chaos` by its folder."""
    tests = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(tests).parts[0]
        item.add_marker(MARKER_OF_FOLDER.get(folder, "unit"))
