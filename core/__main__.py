"""The program of one engine core: `python -m engine.core CONFIG CORE_INDEX EPOCH`."""

from __future__ import annotations

import gc
import sys

import zmq

from ..protocol.config import load_updated_config
from ..protocol.process import configure_logging, exit_with_parent, name_process
from ..protocol.transport import StatusReporter


def main(config_path: str, core_index: int, epoch: int) -> int:
    """Run the core until it stops. Return the process's exit code."""
    # Garbage collections would take a tenth of the import time and free nothing. The core enables them when it has its
    # KV cache.
    gc.disable()
    from .engine_core import EngineCore

    config = load_updated_config(config_path, epoch)
    name = f"core {core_index}"
    name_process(name)
    configure_logging(name, config.frontend.log_level, config.frontend.log_format, core_index)
    exit_with_parent(config.run_dir)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    status = StatusReporter(zmq.Context(), config, name)

    def work() -> None:
        core = EngineCore(config, core_index, context, status)
        try:
            core.run()
        finally:
            core.close()

    return status.run(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:4])))
