"""The frontend program: `python -m engine.frontend CONFIG_PATH CLIENT_INDEX LISTEN_FD EPOCH`."""

from __future__ import annotations

import gc
import socket
import sys

import zmq

from ..protocol.config import load_config
from ..protocol.process import configure_logging, exit_with_parent, name_process
from ..protocol.supervisor_messages import Stage
from ..protocol.transport import StatusReporter


def main() -> int:
    """Run a frontend and return its exit code."""
    config_path, index, listen_fd, epoch = sys.argv[1:]
    config = load_config(config_path, int(epoch))
    client_index = int(index)
    name = f"frontend {client_index}"
    name_process(name)
    uds = config.frontend.uds
    # A socket that was taken over from another engine still belongs to that engine for some time.
    sockets = [] if uds is None or config.takes_over else [uds]
    exit_with_parent(config.run_dir, sockets)
    configure_logging(name, config.frontend.log_level, config.frontend.log_format)
    reporter = StatusReporter(zmq.Context(), config, name)
    reporter.report(Stage.STARTING)

    # Garbage collections would take a tenth of the import time and free nothing. The server enables them when it is
    # ready.
    gc.disable()

    def work() -> None:
        from .api.server import serve

        listener = socket.socket(fileno=int(listen_fd))
        serve(config, client_index, listener, reporter, on_retire=sockets.clear)

    return reporter.run(work)


if __name__ == "__main__":
    sys.exit(main())
