"""The `engine` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ... import __version__

PROGRAMS = {
    "embed": "engine.frontend.offline.embed",
    "replay": "engine.core.replay",
    "run-batch": "engine.frontend.offline.run_batch",
    "simulate": "engine.core.simulation",
    "transcribe": "engine.frontend.offline.transcribe",
}
"""Commands that are modules of their own. The frontend may not import the scheduler."""

COMMANDS = """\
commands:
  serve [MODEL] [flags]     serve a model over HTTP; see engine serve --help
  upgrade [MODEL] [flags]   replace a running server by a new version or model, without downtime
  embed [MODEL] [flags]     embed the lines of a file, without a server
  transcribe FILE --model MODEL
                            write down what is said in audio files, without a server
  run-batch -i FILE -o FILE [--url URL] [flags]
                            answer a file of requests, with or without a server
  status [--url URL]        show a live table of a running server's processes
  why ID [--url URL]        explain what happened to a request of a running server
  replay FILE [flags]       replay a scheduler dump, or explain why a request waited
  simulate TRACE [flags]    predict the latency and throughput of a trace
  keygen [--out FILE]       create the key that the machines of one engine share
  worker --core HOST:PORT --key FILE
                            run one worker on this machine (torchrun starts it)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `engine` command with `argv` (default: `sys.argv`) and return the exit code."""
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
        choices=("serve", "upgrade", "status", "why", "keygen", "worker", *PROGRAMS),
        help=argparse.SUPPRESS,
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    parsed = parser.parse_args(arguments)
    if parsed.command in PROGRAMS:
        _run_module(PROGRAMS[parsed.command], parsed.arguments)
    if parsed.command == "status":
        from .status import status

        return status(parsed.arguments)
    if parsed.command == "why":
        from .why import why

        return why(parsed.arguments)
    if parsed.command == "keygen":
        from .keygen import keygen

        return keygen(parsed.arguments)
    if parsed.command == "worker":
        from .join import work

        return work(parsed.arguments)
    if parsed.command == "upgrade":
        from .upgrade import upgrade

        return upgrade(parsed.arguments)
    # A late import keeps `engine --help` fast.
    from .serve import serve

    return serve(parsed.arguments)


def _open_standard_streams() -> None:
    """Open /dev/null in place of each standard stream that the parent process closed.

    Otherwise the next file or socket would get that descriptor and receive what is printed.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w"))  # noqa: SIM115


def _run_module(name: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process with another program of this package."""
    command = [sys.executable, "-P", "-m", name, *arguments]
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
