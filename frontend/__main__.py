"""`python -m engine.frontend CONFIG_PATH CLIENT_INDEX LISTEN_FD`."""

from __future__ import annotations

import logging
import socket
import sys

import zmq

from ..protocol.config import load_config
from ..protocol.errors import EngineError
from ..protocol.messages import Stage
from ..protocol.process import configure_logging, die_with_parent, name_process
from ..protocol.transport import StatusReporter

logger = logging.getLogger(__name__)


def main() -> int:
    config_path, index, listen_fd = sys.argv[1:]
    config = load_config(config_path)
    client_index = int(index)
    name = f"frontend {client_index}"
    name_process(name)
    uds = config.frontend.uds
    die_with_parent(config.run_dir, *([uds] if uds else []))
    configure_logging(name, config.frontend.log_level)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reporter = StatusReporter(context, config, name)
    try:
        reporter.report(Stage.STARTING)
        from .server import serve

        serve(config, client_index, socket.socket(fileno=int(listen_fd)), reporter)
    except EngineError as error:
        reporter.report(Stage.FAILED, str(error))
        return 1
    except Exception as error:
        logger.exception("the frontend failed")
        reporter.report(Stage.FAILED, f"{type(error).__name__}: {error}")
        return 1
    finally:
        reporter.close()
        context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main())
