"""The command `engine serve`: parse the command line, start the engine and run it until it is stopped."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence

import msgspec

from ... import __version__
from ...protocol.config import EngineConfig
from ...protocol.errors import ConfigError, EngineError, counted
from ...protocol.process import name_process
from ..model_source.options import ModelOptions, ResolvedModel, use_hub_token
from ..supervisor.console import Console, StartupProgress, format_bytes
from ..supervisor.engine_processes import engine_processes
from ..supervisor.guardian.fork_server import ForkServer, stop_fork_servers
from ..supervisor.guardian.guardian import Guardian, become_subreaper
from ..supervisor.guardian.link import GuardianLink, Notice
from ..supervisor.guardian.open_files import raise_open_file_limit, verify_open_file_limit
from ..supervisor.guardian.service_manager import notify_service_manager
from ..supervisor.handover import HandoverRequested, HandoverSocket, ServedEngine
from ..supervisor.listener import Listener
from ..supervisor.local_process import ProcessSpec
from ..supervisor.run_dir import RunDirectory
from ..supervisor.signals import StopRequested, StopSignals
from ..supervisor.supervisor import Supervisor
from .arguments import Settings, make_parser, parse_settings, unread_variables
from .engine_config import make_engine_config, make_frontend_config
from .fork import run_in_fork
from .join import serve_headless
from .launch_options import LaunchOptions
from .peer_flags.command_line import flags_without_effect

__all__ = ["make_parser", "serve"]


def serve(argv: Sequence[str], fork_servers: dict[str, ForkServer]) -> int:
    """Serve until a stop signal. Return the exit code; invalid arguments exit with code 2.

    Args:
        argv: The arguments of `engine serve`.
        fork_servers: Program -> the fork server of its processes.

    Returns:
        0 after SIGTERM, SIGINT or SIGHUP; 1 after a failure; 128 + the signal number if a second signal ended the
            drain.
    """

    def run(console: Console, signals: StopSignals) -> None:
        settings = parse_settings(argv)
        console.log_format = settings["frontend"].get("log_format", "text")
        use_hub_token(settings["model"].get("hf_token"))
        warn_of_unread_variables(console)
        if flags := flags_without_effect(argv):
            console.line(f"flags without effect in Engine: {', '.join(flags)}")
        _serve(argv, settings, fork_servers, console, signals)

    return run_supervisor(run)


def warn_of_unread_variables(console: Console) -> None:
    """Log the environment variables that have the prefix of an option but no effect."""
    if unread := unread_variables(os.environ):
        console.line(f"ignored environment variables: {', '.join(unread)}")


def run_supervisor(run: Callable[[Console, StopSignals], None]) -> int:
    """Call `run` with this process set up as a supervisor, and return the exit code."""
    console = Console()
    name_process("supervisor")
    raise_open_file_limit()
    with StopSignals() as signals:
        code = _run_to_exit_code(lambda: run(console, signals), console)
    if not code:
        console.line("stopped")
    return code


class _SupervisorExited(Exception):
    """The supervisor of a guardian has exited with a code other than 0, after it has written the reason."""

    def __init__(self, code: int) -> None:
        self.code = code


def _run_to_exit_code(run: Callable[[], None], console: Console) -> int:
    """Call `run`, write the error that it raises, and return the exit code."""
    try:
        run()
    except _SupervisorExited as exited:
        return exited.code
    except StopRequested as stop:
        console.line(f"stopped immediately by {stop}")
        return 128 + stop.signum
    except EngineError as error:
        console.error(str(error))
        return 1
    return 0


def _serve(
    argv: Sequence[str],
    settings: Settings,
    fork_servers: dict[str, ForkServer],
    console: Console,
    signals: StopSignals,
) -> None:
    verify_open_file_limit()
    launch = LaunchOptions(**settings["launch"])
    if launch.headless:
        stop_fork_servers(fork_servers)
        serve_headless(launch, settings, console, signals)
        return
    if launch.node_rank:
        raise ConfigError(
            f"--node-rank {launch.node_rank} needs --headless, because only node 0 serves the API"
        )
    frontend = make_frontend_config(settings)
    console.line(f"engine {__version__}")
    with Listener(frontend) as listener:
        settings["frontend"]["port"] = listener.port
        try:
            model = resolve_model(settings, console, signals)
        except StopRequested:
            return
        serve_model([list(argv)], settings, model, fork_servers, listener, console, signals)


def serve_model(
    arguments: list[list[str]],
    settings: Settings,
    model: ResolvedModel,
    fork_servers: dict[str, ForkServer],
    listener: Listener,
    console: Console,
    signals: StopSignals,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serve a model until the first stop signal, or a handover to a successor, has been handled.

    Args:
        arguments: The arguments of `engine serve`, then the arguments of each `engine upgrade` since then.
        settings: The settings that these arguments resulted in.
        model: The resolved model.
        fork_servers: Program -> the fork server of its processes, if the engine has a guardian.
        listener: The listening socket.
        console: The output for progress lines.
        signals: The source of stop signals.
        on_ready: Called when the engine is ready. If given, another engine accepts connections until then.

    Raises:
        StopRequested: A second signal was received.
    """
    with RunDirectory() as run_dir:
        config = make_engine_config(settings, model, run_dir.path)
        config = msgspec.structs.replace(config, takes_over=on_ready is not None)
        specs = engine_processes(config, config.save(), listener.socket.fileno(), run_dir.lock_fd)
        verify_open_file_limit(len(specs))
        engine = ServedEngine(__version__, os.getpid(), listener.url, arguments, os.getcwd())

        def become_ready() -> None:
            if on_ready is not None:
                on_ready()
            notify_service_manager(f"READY=1\nMAINPID={engine.pid}")

        on_notice = {
            Notice.READY: become_ready,
            Notice.HANDED_OVER: listener.hand_over,
            Notice.NOT_LISTENING: listener.close,
        }
        # Nodes on other machines could not continue with another supervisor.
        if config.parallel.is_distributed:
            stop_fork_servers(fork_servers)
        if not fork_servers or not become_subreaper():
            _supervise(
                config,
                specs,
                engine,
                listener,
                console,
                signals,
                lambda notice: on_notice[notice](),
            )
            return

        def supervise(link: GuardianLink) -> int:
            name_process("supervisor")
            signals.separate()

            def notify(notice: Notice) -> None:
                if notice is not Notice.READY:
                    listener.hand_over()
                link.send(notice)

            return _run_to_exit_code(
                lambda: _supervise(config, specs, engine, listener, console, signals, notify, link),
                console,
            )

        name_process("guardian")
        timeout_s = config.recovery.heartbeat_timeout_s
        guardian = Guardian(
            signals.fd, signals.take, on_notice, console.line, timeout_s, fork_servers
        )
        code = guardian.run(supervise)
    if code:
        raise _SupervisorExited(code)


def _supervise(
    config: EngineConfig,
    specs: list[ProcessSpec],
    engine: ServedEngine,
    listener: Listener,
    console: Console,
    signals: StopSignals,
    notify: Callable[[Notice], None],
    link: GuardianLink | None = None,
) -> None:
    """Run the supervisor of an engine until it has stopped. The guardian, if any, receives what `notify` reports."""
    was_ready = link is not None and link.was_ready
    with Supervisor(
        config,
        specs,
        on_status=StartupProgress(console).update,
        on_recovery=console.line,
        signals=signals,
        guardian=link,
    ) as supervisor:
        if (num_nodes := config.parallel.num_remote_nodes) and not was_ready:
            address = config.parallel.node_address
            console.line(f"waiting for {counted(num_nodes, 'more node')} to join {address}")

        def announce() -> None:
            if not was_ready:
                console.line(f"ready at {listener.url}  serving {config.model.served_names[0]}")
                console.release_stream()
            if not config.parallel.is_distributed:
                supervisor.offer_handover(HandoverSocket(config.run_dir, engine, listener.socket))
            notify(Notice.READY)

        run_until_stopped(supervisor, console, announce, notify)


def run_until_stopped(
    supervisor: Supervisor,
    console: Console,
    announce: Callable[[], None],
    notify: Callable[[Notice], None],
) -> None:
    """Start the engine, announce it, and handle the first stop signal.

    A stop signal drains the engine, or stops it immediately if it is not ready yet. When a successor takes over the
    listening socket, the engine drains as well, but without a time limit. The listening socket is closed after the last
    frontend has exited, so that new clients are refused instead of waiting.

    Raises:
        ProcessFailed: A process failed and the engine cannot continue.
        StopRequested: A second signal was received.
    """
    try:
        supervisor.start()
        supervisor.wait_until_ready()
        announce()
        try:
            supervisor.watch()
        except HandoverRequested:
            console.line("another engine accepts new connections; finishing the open ones")
            notify(Notice.HANDED_OVER)
            supervisor.retire()
            supervisor.drain()
    except StopRequested:
        if supervisor.was_ready:
            limit = supervisor.drain_timeout_s
            console.line(
                f"draining for at most {limit:g} s; a second signal stops the server immediately"
            )
            supervisor.drain(lambda: notify(Notice.NOT_LISTENING))


def resolve_model(settings: Settings, console: Console, signals: StopSignals) -> ResolvedModel:
    """Resolve the model of the settings to a local checkpoint, and print a line that describes it.

    Raises:
        EngineError: The model does not exist, or it cannot be served.
        StopRequested: A stop signal was received.
    """

    def resolve() -> ResolvedModel:
        # The process exits soon.
        gc.disable()
        from ..model_source.config import resolve_model

        return resolve_model(ModelOptions(**settings["model"]), console)

    # A child process releases the memory of these imports (numpy, huggingface-hub) when it exits.
    model = run_in_fork(resolve, ResolvedModel, signals)
    config = model.config
    console.line(
        f"model {config.model}  {config.architecture}, {format_bytes(model.size_bytes)}, "
        f"{config.max_model_len} tokens of context"
    )
    return model
