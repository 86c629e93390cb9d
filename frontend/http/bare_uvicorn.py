"""uvicorn without its command line, its supervisors of processes and what configures logging.

They take 2.3 MiB of memory. Importing any of uvicorn's modules first imports the package, which imports them.
"""

import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any


def install() -> None:
    """Register the package without running it. Does nothing if it is imported already.

    It runs when its first attribute is read, so that an application that imports Engine can use all of uvicorn.
    """
    if "uvicorn" in sys.modules:
        return
    # The configuration uses it only if it is given a configuration of logging.
    logging.config = _register("logging.config")  # type: ignore[attr-defined]
    package = _register("uvicorn")
    # One of its modules imports this from the package.
    package.__dict__["Config"] = importlib.import_module("uvicorn.config").Config


def _register(name: str) -> ModuleType:
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
