"""Print the modules that the other parts or the server need and that cannot be imported on this machine."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path

# Python adds this file's folder to its path; the code that the benchmarks share is one folder above.
sys.path.insert(0, str(Path(__file__).parents[1]))

from on_gpu.reporting import Reporter

MODULES = (
    "numpy",
    "torch",
    "triton",
    "safetensors",
    "tokenizers",
    "msgspec",
    "zmq",
    "psutil",
    "engine.workers.execution.model_runner",
    "engine.workers.worker",
    # Needed only by the server.
    "setproctitle",
    "uvloop",
    "httptools",
    "uvicorn",
    "starlette",
    "jinja2",
    "yaml",
    "huggingface_hub",
    "llguidance",
    "prometheus_client",
    "engine.frontend.cli.main",
    "engine.core.engine_core",
)
"""The modules in dependency order: each comes before those that need it."""


def main() -> None:
    reporter = Reporter()
    for name in MODULES:
        reporter.say(name, partial(_version, name))


def _version(name: str) -> dict[str, str]:
    return {"version": str(getattr(importlib.import_module(name), "__version__", ""))}


if __name__ == "__main__":
    main()
