"""The scheduler decides by what it is told alone: no clock, no randomness, no sockets, no processes."""

from __future__ import annotations

import ast
from pathlib import Path

import engine.core

WITH_SIDE_EFFECTS = {
    "__main__",
    "engine_core",
    "event_dump",
    "kv_event_publisher",
    "replay",
    "simulate",
    "structured_output",
    "worker_group",
}
FORBIDDEN = {"time", "datetime", "random", "secrets", "os", "socket", "threading", "asyncio", "zmq"}


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names


def test_the_scheduler_is_pure():
    folder = Path(engine.core.__file__).parent
    modules = [path for path in folder.glob("*.py") if path.stem not in WITH_SIDE_EFFECTS]
    assert {path.stem for path in modules} >= {"scheduler", "kv_cache_manager", "step_results"}
    assert {path.stem: imports(path) & FORBIDDEN for path in modules} == {
        path.stem: set() for path in modules
    }
