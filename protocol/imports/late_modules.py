"""Modules that run when they are first used."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


def register(name: str) -> ModuleType:
    """Return a module that runs when its first attribute is read, or that is imported already."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    loader = spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)

    def run(attribute: str) -> Any:
        del module.__dict__["__getattr__"]
        loader.exec_module(module)
        return getattr(module, attribute)

    module.__dict__["__getattr__"] = run
    return module
