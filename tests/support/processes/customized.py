"""Run a module as a program in a forked process, after what Python does with a PYTHONPATH only at its start.

The processes that the program forks inherit this, and new Python processes read the PYTHONPATH themselves.
"""

import os
import runpy
import sys
from contextlib import suppress

sys.path[:0] = filter(None, os.environ["PYTHONPATH"].split(os.pathsep))
sys.modules.pop("sitecustomize", None)
with suppress(ModuleNotFoundError):
    import sitecustomize  # noqa: F401
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
