"""uvicorn without its command line and its supervisors of processes, which take 1.7 MiB of memory.

Importing any of uvicorn's modules first imports the package, which imports them.
"""

import importlib
import importlib.util
import sys


def install() -> None:
    """Register the package without running it. Does nothing if it is imported already."""
    if "uvicorn" not in sys.modules:
        spec = importlib.util.find_spec("uvicorn")
        assert spec is not None
        package = sys.modules["uvicorn"] = importlib.util.module_from_spec(spec)
        # One of its modules imports this from the package.
        package.__dict__["Config"] = importlib.import_module("uvicorn.config").Config
