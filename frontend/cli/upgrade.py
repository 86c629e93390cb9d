"""The command `engine upgrade`: replace a running server by a new one without downtime.

The new server takes over the old server's listening socket. By default it loads its model while the old server keeps
serving. The weights of both are then in memory until the last request of the old server has ended. If memory does not
suffice, the new server waits until the old one has exited; connections that arrive meanwhile wait in the socket.
"""

from __future__ import annotations

import argparse
import enum
import os
import selectors
import time
from collections.abc import Callable, Sequence
from typing import Final

from ... import __version__
from ...protocol.config import DeviceConfig
from ...protocol.errors import ConfigError
from ...protocol.machine.memory import available_bytes
from ...protocol.store.digest import message_digest
from ..model_source.options import ResolvedModel
from ..store.file_lock import FileLock
from ..supervisor.console import Console
from ..supervisor.guardian.background import continue_in_background, leave_pipes
from ..supervisor.guardian.fork_server import ForkServer, start_fork_servers
from ..supervisor.handover import Predecessor, find_predecessor
from ..supervisor.listener import Listener
from ..supervisor.signals import StopRequested, StopSignals
from .arguments import Settings, parse_settings
from .engine_config import make_frontend_config
from .machine.gpus import has_gpu
from .parsers import add_option, add_switch, command_parser
from .serve import resolve_model, run_supervisor, serve_model, warn_of_unread_variables

MEMORY_FACTOR: Final = 1.5
"""Free memory that a second engine needs (packed weights, KV cache, processes), as a multiple of its weights' size."""


REPLACEMENT_S: Final = 10.0
"""Maximum seconds to wait for the supervisor that replaces a crashed one."""
POLL_S: Final = 0.05


class Overlap(enum.StrEnum):
    """The values of `--overlap`: run both servers at the same time, or one after the other."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser for the flags of `engine upgrade` itself, without those of `engine serve`."""
    parser = command_parser(
        "upgrade",
        "Replace a running server with one of this version. The new server takes over the listening "
        "socket; the old one finishes its requests and exits. Without arguments the new server uses "
        "the same model and flags.",
        "[MODEL] [flags]",
        epilog="MODEL and all flags of engine serve are accepted and override the old server's.",
        takes_serve_flags=True,
    )
    about = "Process ID of the old server, needed if several are running"
    add_option(parser, "--pid", about, parse=int)
    about = "Run both servers until the new one is ready (default: auto, if memory suffices)"
    choices = list(Overlap)
    add_option(parser, "--overlap", about, None, Overlap, Overlap.AUTO, choices=choices)
    add_switch(parser, "--detach", "Continue in the background when the server is ready")
    return parser


def upgrade(argv: Sequence[str]) -> int:
    """Replace a running server, and serve until a stop signal. Return the same exit codes as `engine serve`.

    With `--detach`, return 0 as soon as the new server is ready, and 1 if it fails before that.
    """
    parser = make_parser()
    parsed, arguments = parser.parse_known_args(argv)
    # An invalid flag exits here with code 2.
    given = parse_settings(arguments, {})
    on_ready = continue_in_background() if parsed.detach else _do_nothing

    def run(console: Console, signals: StopSignals) -> None:
        predecessor = find_predecessor(pid=parsed.pid, url_end=_url_end(given))
        old = predecessor.engine
        if parsed.detach:
            leave_pipes(predecessor.log_fd, console.keep_stream)
        if not arguments:
            os.chdir(old.directory)
        settings = parse_settings(arguments, earlier=old.arguments)
        console.log_format = settings["frontend"].get("log_format", "text")
        warn_of_unread_variables(console)
        console.line(f"engine {__version__}, in place of engine {old.version} at {old.url}")
        argument_lists = [*old.arguments, arguments]
        with start_fork_servers() as fork_servers:
            _take_over(
                predecessor,
                settings,
                argument_lists,
                parsed.overlap,
                fork_servers,
                on_ready,
                console,
                signals,
            )

    return run_supervisor(run)


def _url_end(given: Settings) -> str | None:
    """Return the end of the old server's URL that the given host and port flags determine; None if neither is given."""
    frontend = given["frontend"]
    if (uds := frontend.get("uds")) is not None:
        return f"unix://{os.path.abspath(uds)}"
    if (port := frontend.get("port")) is not None:
        return f":{port}{frontend.get('root_path', '')}"
    return None


def _take_over(
    predecessor: Predecessor,
    settings: Settings,
    arguments: list[list[str]],
    overlap: Overlap,
    fork_servers: dict[str, ForkServer],
    on_ready: Callable[[], None],
    console: Console,
    signals: StopSignals,
) -> None:
    if not predecessor.engine.url.startswith("unix:"):
        settings["frontend"]["port"] = predecessor.listener.getsockname()[1]
    frontend = make_frontend_config(settings)
    try:
        model = resolve_model(settings, console, signals)
    except StopRequested:
        return
    can_share = _can_share_store(settings)
    if overlap is Overlap.ON and not can_share:
        raise ConfigError(
            "--overlap on: the old server uses the same --store file, and its version cannot share that "
            "file; use --overlap auto"
        )
    is_together = overlap is Overlap.ON or (
        overlap is Overlap.AUTO and can_share and _has_memory_for_both(settings, model)
    )
    listener = Listener(frontend, taken_over=predecessor.listener)
    if not is_together:
        console.line("waiting for the old server to finish its requests; new connections wait")
        predecessor.take()
        listener.own_path()
        if not _wait_for_exit(predecessor, signals):
            listener.close()
            return

    def finish() -> None:
        if is_together:
            _take(predecessor)
            listener.own_path()
        console.release_stream()
        on_ready()

    with listener:
        serve_model(arguments, settings, model, fork_servers, listener, console, signals, finish)


def _can_share_store(settings: Settings) -> bool:
    """Return whether the new server can use the file of `--store` while the old one does."""
    path = settings["store"].get("path")
    if path is None:
        return True
    lock = FileLock(path)
    try:
        if lock.try_acquire():
            return True
        holder = lock.read_holder()
        return holder is not None and holder.protocol == message_digest()
    finally:
        lock.close()


def _has_memory_for_both(settings: Settings, model: ResolvedModel) -> bool:
    """Return whether the weights of both servers fit in memory.

    On a GPU they never do, because a server takes all of it.
    """
    if has_gpu(DeviceConfig(**settings["device"]).device):
        return False
    return MEMORY_FACTOR * model.size_bytes < available_bytes()


def _take(predecessor: Predecessor) -> None:
    """Let the old server stop accepting connections, even if its supervisor is just being replaced."""
    deadline = time.monotonic() + REPLACEMENT_S
    while not predecessor.take() and predecessor.is_running() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _wait_for_exit(predecessor: Predecessor, signals: StopSignals) -> bool:
    """Wait until the old server has exited. Return False if a stop signal arrives first."""
    while predecessor.is_running():
        with selectors.DefaultSelector() as selector:
            selector.register(predecessor.fd, selectors.EVENT_READ)
            selector.register(signals.fd, selectors.EVENT_READ)
            try:
                selector.select()
                signals.raise_if_received()
            except StopRequested:
                return False
        # A supervisor that replaces another one may not know of this successor.
        predecessor.take()
        time.sleep(POLL_S)
    return True


def _do_nothing() -> None:
    pass
