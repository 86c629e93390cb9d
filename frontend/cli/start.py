"""The entry of `engine serve`, which starts the fork servers before it imports what serves."""

from __future__ import annotations

import gc
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ...protocol.process import name_process
from ..supervisor.guardian.fork_server import ForkServer, start_fork_servers
from ..supervisor.guardian.open_files import raise_open_file_limit

if TYPE_CHECKING:
    import argparse


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from .arguments import make_parser

    return make_parser()


def serve(argv: Sequence[str]) -> int:
    """Serve until a stop signal, and return the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the server handles Ctrl-C, it ends the process: an exception would be lost in a fork's hooks.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    name_process("supervisor")
    raise_open_file_limit()
    gc.disable()
    servers: AbstractContextManager[dict[str, ForkServer]] = nullcontext({})
    if not any(argument == "-h" or argument.startswith("--help") for argument in argv):
        servers = start_fork_servers()
    with servers as fork_servers:
        # A late import, because the fork servers import modules meanwhile.
        from .serve import serve

        gc.freeze()
        gc.enable()
        return serve(argv, fork_servers)
