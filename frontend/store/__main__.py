"""The store program: `python -m engine.frontend.store CONFIG_PATH INDEX EPOCH`."""

from __future__ import annotations

import gc
import sys

import zmq

from ...protocol.config import load_config
from ...protocol.heartbeat import Pulse
from ...protocol.process import StopSignal, configure_logging, exit_with_parent, name_process
from ...protocol.supervisor_messages import Stage
from ...protocol.transport import StatusReporter


def main() -> int:
    """Run the store and return its exit code."""
    config_path, _, epoch = sys.argv[1:]
    config = load_config(config_path, int(epoch))
    name_process("store")
    exit_with_parent(config.run_dir)
    configure_logging("store", config.frontend.log_level, config.frontend.log_format)
    stop = StopSignal()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reporter = StatusReporter(zmq.Context(), config, "store")
    reporter.report(Stage.STARTING)
    pulse = Pulse(config, "store")

    # Garbage collections would take a tenth of the import time and free nothing.
    gc.disable()

    def work() -> None:
        from .engine_store import EngineStore

        gc.freeze()
        gc.enable()

        store = EngineStore(config, context)
        pulse.count_dropped_frames = lambda: store.num_dropped_frames
        store.poller.register(stop.fd, zmq.POLLIN)
        reporter.report(Stage.READY)
        try:
            while not stop.requested:
                store.wait()
                pulse.begin_step()
                store.turn()
                pulse.end_step()
        finally:
            store.close()

    return reporter.run(work)


if __name__ == "__main__":
    sys.exit(main())
