"""The entry point of the `engine` command, which runs one of the commands in `commands.py`."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from ... import __version__
from .commands import COMMANDS, describe_commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `engine` command with `argv` (default: `sys.argv`) and return the exit code, 130 after Ctrl-C."""
    try:
        return _run_command(argv)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run_command(argv: Sequence[str] | None) -> int:
    _open_standard_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="engine",
        usage="engine COMMAND ...",
        description="A fast, small, crash-proof server for large language models.",
        epilog=describe_commands(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"engine {__version__}")
    parser.add_argument("command", choices=tuple(COMMANDS), help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    for argument in arguments:
        _check_encoding(argument)
    parsed = parser.parse_args(arguments)
    command = COMMANDS[parsed.command]
    if command.is_program:
        _run_module(command.module.removesuffix(".__main__"), parsed.arguments)
    # A late import keeps `engine --help` fast.
    code: int = getattr(_import(command.module), command.function)(parsed.arguments)
    return code


def _import(name: str) -> ModuleType:
    """Import a module of this package. Ctrl-C ends the process meanwhile.

    An exception would not: native modules ignore those that are raised while they import others.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Garbage collections would take a tenth of the time and free nothing.
    gc.disable()
    module = import_module(name, __package__ or "engine.frontend.cli")
    gc.freeze()
    gc.enable()
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    return module


def _check_encoding(argument: str) -> None:
    """Exit with a message and code 2 if Python could not decode the argument.

    Messages between processes are UTF-8, so it could not be sent.
    """
    try:
        argument.encode()
    except UnicodeEncodeError:
        print(
            f"engine: error: the argument {os.fsencode(argument)!r} is not text in {sys.getfilesystemencoding()}, the "
            "encoding of this locale; rename the file, or set LC_ALL=C.UTF-8 if the name is in UTF-8",
            file=sys.stderr,
        )
        sys.exit(2)


def _open_standard_streams() -> None:
    """Open /dev/null for each standard stream that the parent process closed.

    Otherwise the next opened file or socket would get the stream's descriptor, and receive the printed text.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w"))  # noqa: SIM115


def _run_module(name: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process with another program of the package `engine`."""
    command = [sys.executable, "-P", "-m", name, *arguments]
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
