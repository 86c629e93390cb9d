"""The arguments that `engine simulate` and `engine plan` share: the simulated system, and the source of its times."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from ...protocol.config import CacheConfig, SchedulerConfig, SchedulingPolicy, SpeculativeConfig
from ...protocol.errors import EngineError, counted
from ..replay.dump import SUFFIX, Dump, read_dump
from ..replay.recorder import Setup
from .draft_model import DraftModel, constant_drafts, measure_drafts
from .frontend_times import FrontendTimes, measure_frontend
from .step_time import StepTimeModel, fit, measure_steps
from .trace import TraceRequest, read_trace, trace_from_dump

T = TypeVar("T")

DEFAULT_DRAFTS = 8
"""Maximum number of drafts after a token if the log does not set it."""

TRACE_HELP = f"JSON lines, or a dump of the event log (*{SUFFIX})"


class Inputs(NamedTuple):
    """The inputs of a simulation.

    Attributes:
        trace: The requests, sorted by arrival.
        setup: The recorded server's scheduler, changed by the arguments.
        step_time: The model of step times.
        drafts: The model of drafts, or None for no drafts.
        frontend: The times in the frontend.
    """

    trace: list[TraceRequest]
    setup: Setup
    step_time: StepTimeModel
    drafts: DraftModel | None
    frontend: FrontendTimes


def add_option(
    parser: argparse.ArgumentParser,
    name: str,
    about: str,
    metavar: str,
    parse: Callable[[str], Any] = str,
    default: Any = None,
) -> None:
    """Add an option with one value."""
    parser.add_argument(name, metavar=metavar, type=parse, default=default, help=about)


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `read_inputs` reads."""
    parser.add_argument(
        "--fit",
        metavar="DUMP",
        action="append",
        default=[],
        help="Event log dump to fit the step times to; may be repeated",
    )
    about = "Seconds per step, token, sequence and cached token (instead of --fit)"
    add_option(parser, "--step-time", about, "BASE,TOKEN,SEQUENCE,KV_TOKEN", list_of(float))
    about = (
        "Share of tokens followed by drafts, and probability that a draft is accepted; 0,0 disables "
        "drafts (default: as recorded)"
    )
    add_option(parser, "--drafts", about, "FOUND,RIGHT", list_of(float))
    add_option(
        parser, "--rate", "Factor that multiplies the arrival rate (default: 1)", "R", float, 1.0
    )
    for name, about in (
        ("--max-model-len", "Maximum prompt plus output tokens (default: as recorded, or 32768)"),
        ("--num-blocks", "KV-cache blocks per replica (default: as recorded)"),
        ("--block-size", "Tokens per KV-cache block (default: as recorded, or 16)"),
    ):
        add_option(parser, name, about, "N", positive)
    about = "Scheduler class that the server used, if not the built-in one"
    add_option(parser, "--scheduler-cls", about, "MODULE.CLASS")
    parser.add_argument("--json", action="store_true", help="Print one JSON object per line")


def read_inputs(args: argparse.Namespace) -> Inputs:
    """Return the trace, the setup and the models that the arguments name.

    Raises:
        EngineError: A file or an argument is invalid.
    """
    if not 0 < args.rate < math.inf:
        raise EngineError(f"--rate must be a number greater than 0, got {args.rate}")
    dumps = [read_dump(path, args.scheduler_cls) for path in args.fit]
    if args.trace.endswith(SUFFIX):
        dump = read_dump(args.trace, args.scheduler_cls)
        trace, dumps = trace_from_dump(dump), [dump, *dumps]
    else:
        trace = read_trace(args.trace)
    step_time = _step_time(args.step_time, dumps)
    setup = _setup(args, dumps)
    for request in trace:
        request.arrival /= args.rate
    drafts = _drafts(args.drafts, setup.config.speculative, dumps)
    if drafts is not None and setup.config.speculative is None:
        speculative = SpeculativeConfig(num_speculative_tokens=DEFAULT_DRAFTS)
        config = msgspec.structs.replace(setup.config, speculative=speculative)
        setup = msgspec.structs.replace(setup, config=config)
    setup = msgspec.structs.replace(setup, has_grammars=False, kv_transfer=None)
    return Inputs(trace, setup, step_time, drafts, measure_frontend(dumps))


def list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a parser of values that are separated by commas."""

    def parse_list(text: str) -> list[T]:
        return [parse(item) for item in text.split(",")]

    parse_list.__name__ = "list"
    return parse_list


def positive(text: str) -> int:
    """Return an integer of at least 1. Raise ValueError if the text is not such an integer."""
    value = int(text)
    if value < 1:
        raise ValueError(f"must be at least 1, got {value}")
    return value


def policies_of(setup: Setup, given: list[SchedulingPolicy] | None) -> list[SchedulingPolicy]:
    """Return the policies to compare: those of `--policy`, or the recorded server's."""
    return given or [setup.config.policy]


def _step_time(given: list[float] | None, dumps: Sequence[Dump]) -> StepTimeModel:
    if given is not None:
        if len(given) != 4 or min(given) < 0 or sum(given) == 0:
            raise EngineError(
                "--step-time needs four numbers: none may be negative, and at least one must be positive"
            )
        base, per_token, per_sequence, per_kv_token = given
        return StepTimeModel(base, per_token, per_sequence, per_kv_token)
    if not dumps:
        raise EngineError("the step time is unknown; give --fit DUMP or --step-time")
    fitted = fit([sample for dump in dumps for sample in measure_steps(dump)])
    print(
        f"step time fitted to {counted(fitted.num_steps, 'step')}: single steps {fitted.mean_error:.0%} off; on "
        f"held-out parts of the log {fitted.held_out_error:.0%}, their total {fitted.held_out_bias:+.1%}",
        file=sys.stderr,
    )
    return fitted.model


def _drafts(
    given: list[float] | None, speculative: SpeculativeConfig | None, dumps: Sequence[Dump]
) -> DraftModel | None:
    if given is None:
        return measure_drafts(dumps)
    if len(given) != 2 or not all(0 <= each <= 1 for each in given):
        raise EngineError(f"--drafts needs two numbers from 0 to 1, got {given}")
    if not given[0]:
        return None
    most = speculative.num_speculative_tokens if speculative is not None else DEFAULT_DRAFTS
    return constant_drafts(given[0], given[1], most)


def _setup(args: argparse.Namespace, dumps: Sequence[Dump]) -> Setup:
    """Return the setup of the first dump, or a default one, changed by the arguments."""
    if dumps:
        setup = dumps[0].setup
    else:
        if args.num_blocks is None:
            raise EngineError(
                "the size of the KV cache is unknown; give --num-blocks or --fit DUMP"
            )
        setup = Setup(SchedulerConfig(), CacheConfig(), args.max_model_len or 32768, 1, 2)
    if args.block_size is not None and args.trace.endswith(SUFFIX):
        raise EngineError(
            "--block-size cannot be changed for a dump: its prompts are recorded as hashes of blocks"
        )
    block_size = args.block_size or setup.cache_config.block_size
    return msgspec.structs.replace(
        setup,
        cache_config=msgspec.structs.replace(setup.cache_config, block_size=block_size),
        max_model_len=args.max_model_len or setup.max_model_len,
        num_blocks=args.num_blocks or setup.num_blocks,
    )
