"""The `engine` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__

COMMANDS = """\
commands:
  serve [MODEL] [flags]     serve a model over HTTP; see engine serve --help
  status [--url URL]        a live table of the processes of a running server
  replay FILE [flags]       run a recorded scheduler again, or tell why a request waited
  simulate TRACE [flags]    predict latencies and throughput of a trace, in virtual time
  keygen [--out FILE]       make the key that the machines of one engine share
  worker --core HOST:PORT --key FILE
                            run one worker on this machine; torchrun starts it
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ARGV (default: this process's); returns the exit code."""
    _open_standard_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="engine",
        usage="engine COMMAND ...",
        description="A fast, small, crash-proof server for large language models.",
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"engine {__version__}")
    parser.add_argument(
        "command",
        choices=("serve", "status", "replay", "simulate", "keygen", "worker"),
        help=argparse.SUPPRESS,
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    parsed = parser.parse_args(arguments)
    if parsed.command in ("replay", "simulate"):
        # The scheduler is not part of the frontend.
        _run_module(f"engine.core.{parsed.command}", parsed.arguments)
    if parsed.command == "status":
        from .status import status

        return status(parsed.arguments)
    if parsed.command == "keygen":
        from .keygen import keygen

        return keygen(parsed.arguments)
    if parsed.command == "worker":
        from .join import work

        return work(parsed.arguments)
    # Imported here so that `engine --help` costs nothing.
    from .serve import serve

    return serve(parsed.arguments)


def _open_standard_streams() -> None:
    """Open those that a parent has closed: what is opened next would get their numbers, and what is printed."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w"))  # noqa: SIM115


def _run_module(name: str, arguments: Sequence[str]) -> NoReturn:
    """Become another program of this package."""
    command = [sys.executable, "-P", "-m", name, *arguments]
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
