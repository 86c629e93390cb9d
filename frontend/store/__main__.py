"""The store program: `python -m engine.frontend.store CONFIG_PATH INDEX EPOCH`."""

from __future__ import annotations

import sys

import zmq

from ...protocol.config import load_config
from ...protocol.heartbeat import Pulse
from ...protocol.process import StopSignal, configure_logging, exit_with_parent, name_process
from ...protocol.supervisor_messages import Stage
from ...protocol.transport import StatusReporter

TURN_MS = 1000
"""Maximum milliseconds between turns without messages."""


def main() -> int:
    """Run the store and return its exit code."""
    config_path, _, epoch = sys.argv[1:]
    config = load_config(config_path, int(epoch))
    name_process("store")
    exit_with_parent(config.run_dir)
    configure_logging("store", config.frontend.log_level)
    stop = StopSignal()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reporter = StatusReporter(context, config, "store")
    reporter.report(Stage.STARTING)
    pulse = Pulse(context, config, "store")

    def work() -> None:
        from .server import StoreServer

        server = StoreServer(config, context)
        pulse.count_dropped_frames = lambda: server.num_dropped_frames
        poller = zmq.Poller()
        poller.register(stop.fd, zmq.POLLIN)
        poller.register(server.socket, zmq.POLLIN)
        reporter.report(Stage.READY)
        try:
            while not stop.requested:
                poller.poll(TURN_MS)
                pulse.begin_step()
                server.turn()
                pulse.end_step()
        finally:
            server.close()

    return reporter.run(work)


if __name__ == "__main__":
    sys.exit(main())
