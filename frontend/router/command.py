"""The command `engine router`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ...protocol.process import configure_logging, name_process
from ..api.server import uvicorn_config
from ..cli.option_values import parse_number
from ..cli.parsers import add_option, command_parser
from ..http.server import HTTPServer
from ..supervisor.console import Console, reports_errors
from ..supervisor.listener import Listener, is_loopback
from ..supervisor.run_dir import ROUTER_FILE, RunDirectory
from .app import create_app
from .children import Children
from .models_file import RoutedModel, RouterConfig, read_models

DRAIN_POLL_S: Final = 0.1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine router`."""
    parser = command_parser(
        "router",
        "Serve several models at one address. A model is loaded for its first request.",
        "FILE [flags]",
    )
    parser.add_argument("file", metavar="FILE", help="YAML file with the models")
    add_option(parser, "--host", "Address to listen on (default: that of engine serve)", "HOST")
    add_option(parser, "--port", "Port to listen on (default: that of engine serve)", "N", int)
    about = "Maximum number of loaded models; 0 for no limit"
    add_option(parser, "--models-max", about, "N", int, 1)
    about = "Unload models without requests after this time (default: never)"
    add_option(parser, "--idle-seconds", about, "SECONDS", lambda text: parse_number(text, 0))
    parser.add_argument(
        "--no-models-autoload",
        dest="autoloads",
        action="store_false",
        help="Load models only by POST /models/load (default: also for requests)",
    )
    return parser


@reports_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Route until a stop signal. Return 0; invalid arguments exit with code 2."""
    parser = make_parser()
    parsed = parser.parse_args(argv)
    if parsed.models_max < 0:
        parser.error(f"--models-max must be at least 0, got {parsed.models_max}")
    own: dict[str, Any] = {
        name: getattr(parsed, name)
        for name in ("host", "port")
        if getattr(parsed, name) is not None
    }
    config = read_models(parsed.file, own)

    def read() -> list[RoutedModel]:
        return read_models(parsed.file, own).models

    name_process("router")
    configure_logging("router", config.frontend.log_level, config.frontend.log_format)
    with RunDirectory() as directory, Listener(config.frontend) as listener:
        Path(directory.path, ROUTER_FILE).touch()
        names = ", ".join(model.name for model in config.models)
        Console().line(f"routing to {names} at {listener.url}")
        asyncio.run(_route(config, read, parsed, Path(directory.path), listener))
    return 0


async def _route(
    config: RouterConfig,
    read: Callable[[], list[RoutedModel]],
    parsed: argparse.Namespace,
    directory: Path,
    listener: Listener,
) -> None:
    children = Children(config.models, read, directory, parsed.models_max, parsed.idle_seconds)
    stop = asyncio.Event()
    app = create_app(
        children,
        config.frontend,
        autoloads=parsed.autoloads,
        is_loopback=is_loopback(listener.socket),
        is_open=lambda: not stop.is_set(),
    )
    http = HTTPServer(uvicorn_config(app, config.frontend), config.frontend.slow_client_s)

    def on_signal() -> None:
        if stop.is_set():
            for child in children.all:
                child.kill()
            sys.stderr.flush()
            raise SystemExit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(http.serve([listener.socket]))
    watching = asyncio.create_task(children.watch())
    await asyncio.wait(
        {serving, asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED
    )
    http.stop_accepting()
    children.end_subscriptions()
    while http.is_answering:
        await asyncio.sleep(DRAIN_POLL_S)
    watching.cancel()
    await children.close()
    http.exit()
    await serving
