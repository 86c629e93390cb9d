"""`engine serve`: from the command line to a running engine and back to nothing."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence

from .. import __version__
from ..protocol.errors import ConfigError, EngineError
from ..protocol.process import name_process
from .arguments import Settings, parse_settings, unread_variables
from .console import Console, StartupProgress, format_bytes
from .engine_config import make_engine_config, make_frontend_config
from .fork import run_in_fork
from .join import serve_headless
from .listener import Listener
from .model_options import ModelOptions, ResolvedModel
from .node_options import NodeOptions
from .run_dir import RunDirectory
from .stop_signals import StopRequested, StopSignals
from .supervisor import Supervisor, engine_processes


def serve(argv: Sequence[str]) -> int:
    """Serve until told to stop. Returns 0 after SIGTERM, SIGINT or SIGHUP, 1 after a failure, 128 + the signal's number
    when a second one cut the drain short; exits with 2 on bad arguments."""
    settings = parse_settings(argv)
    console = Console()
    if unread := unread_variables(os.environ):
        console.line(f"set in the environment, and not read: {', '.join(unread)}")
    name_process("supervisor")
    _raise_open_file_limit()
    with StopSignals() as signals:
        try:
            node = NodeOptions(**settings["node"])
            if node.headless:
                serve_headless(node, settings, console, signals)
                return 0
            if node.node_rank:
                raise ConfigError(
                    f"--node-rank {node.node_rank} needs --headless: node 0 has the API"
                )
            _serve(settings, console, signals)
        except StopRequested as stop:
            console.line(f"stopped at once by {stop}")
            return 128 + stop.signum
        except EngineError as error:
            console.error(str(error))
            return 1
    console.line("stopped")
    return 0


def _serve(settings: Settings, console: Console, signals: StopSignals) -> None:
    """Returns when a stop signal has been answered; raises StopRequested at the second."""
    frontend = make_frontend_config(settings)
    console.line(f"engine {__version__}")
    with Listener(frontend) as listener:
        settings["frontend"]["port"] = listener.port
        try:
            model = _resolve_model(settings, console, signals)
        except StopRequested:
            return
        with RunDirectory() as run_dir:
            config = make_engine_config(settings, model, run_dir.path)
            specs = engine_processes(config, config.save(), listener.socket.fileno())
            progress = StartupProgress(console)
            with Supervisor(
                config,
                specs,
                on_status=progress.update,
                on_recovery=console.line,
                signals=signals,
            ) as supervisor:
                name = config.model.served_names[0]
                if num_nodes := config.parallel.num_remote_nodes:
                    address = config.parallel.node_address
                    console.line(f"nodes: {num_nodes} more are to join {address}")
                announcement = f"ready at {listener.url}  serving {name}"
                run_until_stopped(supervisor, console, announcement, listener.close)


def run_until_stopped(
    supervisor: Supervisor,
    console: Console,
    announcement: str,
    close_listener: Callable[[], None],
) -> None:
    """Start, announce, and answer the first stop signal: by a drain, or at once if nothing is served yet.

    Once no frontend is left to answer, clients are refused rather than left waiting.

    Raises ProcessFailed if a process fails and StopRequested at the second signal.
    """
    try:
        supervisor.start()
        supervisor.wait_until_ready()
        console.line(announcement)
        supervisor.watch()
    except StopRequested:
        if supervisor.was_ready:
            limit = supervisor.drain_timeout_s
            console.line(f"draining, at most {limit:g} s; stop again to end at once")
            supervisor.drain(close_listener)


def _resolve_model(settings: Settings, console: Console, signals: StopSignals) -> ResolvedModel:
    def resolve_model() -> ResolvedModel:
        from .model_config import resolve_model

        return resolve_model(ModelOptions(**settings["model"]), console)

    # What reading a model imports (numpy, huggingface-hub) would stay in this process for as long as it serves.
    model = run_in_fork(resolve_model, ResolvedModel, signals)
    config = model.config
    console.line(
        f"model {config.model}  {config.architecture}, {format_bytes(model.size_bytes)}, "
        f"{config.max_model_len} tokens of context"
    )
    return model


def _raise_open_file_limit() -> None:
    """Each connection is a file; the usual soft limit of 1024 is meant for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
