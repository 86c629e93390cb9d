"""The commands that run only workers on this machine: `engine worker` and `engine serve --headless`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

import msgspec

from ... import __version__
from ...protocol.config import ParallelConfig
from ...protocol.errors import ConfigError, EngineError
from ...protocol.process import name_process
from ..model_source.options import ModelOptions, ResolvedModel
from ..supervisor.console import Console
from ..supervisor.node import Node, NodePlace
from ..supervisor.signals import StopRequested, StopSignals
from .arguments import Settings
from .engine_config import make_parallel_config
from .fork import run_in_fork
from .launch_options import LaunchOptions
from .parsers import add_option, command_parser


def serve_headless(
    options: LaunchOptions, settings: Settings, console: Console, signals: StopSignals
) -> None:
    """Run the workers of one node until the engine stops.

    Raises:
        EngineError: The engine failed. The message is the reason that node 0 sent.
    """
    parallel = make_parallel_config(settings)
    _join(_make_place(options, parallel), settings, console, signals)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine worker`."""
    parser = command_parser(
        "worker",
        "Run one worker of an engine that uses --distributed-executor-backend external_launcher. "
        "Start it with torchrun --no-python or another launcher that sets RANK, LOCAL_RANK and WORLD_SIZE.",
    )
    about = "Value of --master-addr and --master-port"
    add_option(parser, "--core", about, "HOST:PORT", required=True)
    about = "Key file from engine keygen"
    add_option(parser, "--cluster-key --key", about, "FILE", required=True)
    add_option(parser, "--model", "Path of the model on this machine, if it differs from node 0's")
    return parser


def work(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run `engine worker ARGV`: one worker whose rank comes from torchrun's environment variables.

    Returns:
        The exit code.
    """
    parser = make_parser()
    parsed = parser.parse_args(argv)
    console = Console()
    with StopSignals() as signals:
        try:
            host, port = _split(parsed.core)
            place = NodePlace(
                host,
                port,
                _variable("RANK", environ),
                _variable("WORLD_SIZE", environ),
                os.path.abspath(parsed.cluster_key),
            )
            _variable("LOCAL_RANK", environ)
            settings: Settings = {"model": {"model": parsed.model} if parsed.model else {}}
            _join(place, settings, console, signals)
        except StopRequested as stop:
            return 128 + stop.signum
        except EngineError as error:
            console.error(str(error))
            return 1
    return 0


def _make_place(options: LaunchOptions, parallel: ParallelConfig) -> NodePlace:
    if parallel.nnodes == 1:
        raise ConfigError(
            "--headless needs --nnodes N with N above 1: a single machine must serve the API"
        )
    if not 0 < options.node_rank < parallel.nnodes:
        raise ConfigError(
            f"--node-rank {options.node_rank} --headless must be between 1 and {parallel.nnodes - 1}: "
            f"node 0 of --nnodes {parallel.nnodes} serves the API"
        )
    assert parallel.cluster_key is not None
    return NodePlace(
        parallel.master_addr,
        parallel.master_port,
        options.node_rank,
        parallel.nnodes,
        parallel.cluster_key,
    )


def _join(place: NodePlace, settings: Settings, console: Console, signals: StopSignals) -> None:
    name_process(f"node {place.rank}")
    console.line(f"engine {__version__}")
    if "model" in settings["model"]:

        def resolve_model() -> ResolvedModel:
            from ..model_source.config import resolve_model

            return resolve_model(ModelOptions(**settings["model"]), console)

        resolved = run_in_fork(resolve_model, ResolvedModel, signals)
        place = msgspec.structs.replace(place, model_path=resolved.config.path)
    with Node(place, console, signals) as node:
        node.run()
    console.line("stopped")


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"--core {address!r} must be HOST:PORT, from --master-addr and --master-port of engine serve"
        )
    return host.strip("[]"), int(port)


def _variable(name: str, environ: Mapping[str, str]) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigError(
            f"engine worker needs ${name} to be a number; start it with torchrun --no-python, which sets it"
        ) from None
