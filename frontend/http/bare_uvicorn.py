"""uvicorn without its command line and its supervisors of processes, which take 1.7 MiB of memory.

Importing any of uvicorn's modules first imports the package, which imports them.
"""

import importlib
import importlib.util
import sys
from typing import Any


def install() -> None:
    """Register the package without running it. Does nothing if it is imported already.

    It runs when its first attribute is read, so that an application that imports Engine can use all of uvicorn.
    """
    if "uvicorn" in sys.modules:
        return
    spec = importlib.util.find_spec("uvicorn")
    assert spec is not None and spec.loader is not None
    loader = spec.loader
    package = sys.modules["uvicorn"] = importlib.util.module_from_spec(spec)

    def run(name: str) -> Any:
        del package.__dict__["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    # One of its modules imports this from the package.
    package.__dict__["Config"] = importlib.import_module("uvicorn.config").Config
    package.__dict__["__getattr__"] = run
