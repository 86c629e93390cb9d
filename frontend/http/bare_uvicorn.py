"""uvicorn without its command line, its supervisors of processes and what configures logging.

They take 2.3 MiB of memory. Importing any of uvicorn's modules first imports the package, which imports them.
"""

import importlib
import logging
import sys

from ...protocol.imports import late_modules


def install() -> None:
    """Register the package without running it. Does nothing if it is imported already.

    It runs when its first attribute is read, so that an application that imports Engine can use all of uvicorn.
    """
    if "uvicorn" in sys.modules:
        return
    # The configuration uses it only if it is given a configuration of logging.
    logging.config = late_modules.register("logging.config")  # type: ignore[attr-defined]
    package = late_modules.register("uvicorn")
    # One of its modules imports this from the package.
    package.__dict__["Config"] = importlib.import_module("uvicorn.config").Config
