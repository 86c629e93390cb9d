"""The `engine simulate TRACE` command: run a trace on a number of replicas in virtual time."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from ...protocol.config import CacheConfig, SchedulerConfig, SchedulingPolicy, SpeculativeConfig
from ...protocol.errors import EngineError
from ..replay.dump import SUFFIX, Dump, read_dump
from ..replay.recorder import Setup
from .draft_model import DraftModel, constant_drafts, measure_drafts
from .plot import draw
from .simulate import SimulationResult, simulate
from .step_time import StepTimeModel, fit, mean_error, measure_steps
from .trace import TraceRequest, read_trace, trace_from_dump

T = TypeVar("T")

DEFAULT_DRAFTS = 8
"""Maximum number of drafts after a token if the log does not set it."""

COLUMNS = (
    "finished",
    "requests_per_s",
    "output_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p90_ms",
    "ttft_p99_ms",
    "itl_p50_ms",
    "itl_p90_ms",
    "itl_p99_ms",
    "preemptions",
    "refused",
    "expired",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or 2 if an argument or a file is invalid."""
    args = make_parser().parse_args(argv)
    try:
        if not 0 < args.rate < math.inf:
            raise EngineError(f"--rate must be a number greater than 0, got {args.rate}")
        trace, dumps = _read(args.trace, args.fit, args.scheduler_cls)
        step_time = _step_time(args.step_time, dumps)
        base = _setup(args, dumps)
        for request in trace:
            request.arrival /= args.rate
        results = {}
        drafts = _drafts(args.drafts, base.config.speculative, dumps)
        if drafts is not None and base.config.speculative is None:
            speculative = SpeculativeConfig(num_speculative_tokens=DEFAULT_DRAFTS)
            config = msgspec.structs.replace(base.config, speculative=speculative)
            base = msgspec.structs.replace(base, config=config)
        policies = args.policy or [base.config.policy]
        for policy, num_replicas in itertools.product(policies, args.replicas):
            config = msgspec.structs.replace(base.config, policy=policy)
            setup = msgspec.structs.replace(
                base, config=config, has_grammars=False, kv_transfer=None
            )
            results[policy, num_replicas] = simulate(setup, trace, step_time, num_replicas, drafts)
    except EngineError as error:
        print(f"engine simulate: {error}", file=sys.stderr)
        return 2
    if args.json:
        _print_json(results, step_time)
    else:
        _print_table(results, step_time)
    if args.plot:
        named = {f"{policy}, {n} replicas": result for (policy, n), result in results.items()}
        Path(args.plot).write_text(draw(named), encoding="utf-8")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine simulate`."""
    parser = argparse.ArgumentParser(
        prog="engine simulate",
        description="Run the scheduler over a trace in virtual time, with step times fitted to a recorded log.",
    )
    parser.add_argument(
        "trace", metavar="TRACE", help=f"JSON lines, or a dump of the event log (*{SUFFIX})"
    )
    parser.add_argument(
        "--fit", metavar="DUMP", action="append", default=[], help="fit the step time to this log"
    )
    parser.add_argument(
        "--step-time",
        metavar="BASE,TOKEN,SEQUENCE,KV_TOKEN",
        type=_list_of(float),
        help="seconds per step, and per token, sequence and cached token in it (instead of --fit)",
    )
    parser.add_argument(
        "--policy",
        type=_list_of(SchedulingPolicy),
        help="policies to compare (default: the recorded server's, or fcfs)",
    )
    parser.add_argument(
        "--drafts",
        metavar="FOUND,RIGHT",
        type=_list_of(float),
        help="share of tokens followed by drafts, and probability that a draft is right; 0,0 for none "
        "(default: as in the log)",
    )
    parser.add_argument("--replicas", type=_list_of(_positive), default=[1])
    parser.add_argument(
        "--rate", type=float, default=1.0, help="multiply the arrival rate by this (default: 1)"
    )
    parser.add_argument("--max-num-seqs", type=_positive)
    parser.add_argument("--max-num-batched-tokens", type=_positive)
    parser.add_argument("--max-model-len", type=_positive)
    parser.add_argument("--num-blocks", type=_positive, help="KV-cache blocks of a replica")
    parser.add_argument("--block-size", type=_positive)
    parser.add_argument(
        "--scheduler-cls",
        metavar="MODULE.CLASS",
        help="the scheduler class that the server ran with, if it was not Engine's own",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--plot", metavar="FILE", help="draw the latencies into this SVG file")
    return parser


def _list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    def parse_list(text: str) -> list[T]:
        return [parse(item) for item in text.split(",")]

    parse_list.__name__ = "list"
    return parse_list


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"must be at least 1, got {value}")
    return value


def _read(
    trace: str, fits: Sequence[str], scheduler_cls: str | None
) -> tuple[list[TraceRequest], list[Dump]]:
    fitted = [read_dump(path, scheduler_cls) for path in fits]
    if trace.endswith(SUFFIX):
        dump = read_dump(trace, scheduler_cls)
        return trace_from_dump(dump), [dump, *fitted]
    return read_trace(trace), fitted


def _step_time(given: list[float] | None, dumps: Sequence[Dump]) -> StepTimeModel:
    if given is not None:
        if len(given) != 4 or min(given) < 0 or sum(given) == 0:
            raise EngineError("--step-time takes four numbers that are at least 0 and not all 0")
        return StepTimeModel(*given)
    if not dumps:
        raise EngineError("the step time is unknown; give --fit DUMP or --step-time")
    samples = [sample for dump in dumps for sample in measure_steps(dump)]
    model = fit(samples)
    error = mean_error(model, samples)
    print(f"step time fitted to {len(samples)} steps, {error:.0%} off on average", file=sys.stderr)
    return model


def _drafts(
    given: list[float] | None, speculative: SpeculativeConfig | None, dumps: Sequence[Dump]
) -> DraftModel | None:
    if given is None:
        return measure_drafts(dumps)
    if len(given) != 2 or not all(0 <= each <= 1 for each in given):
        raise EngineError(f"--drafts takes two numbers from 0 to 1, got {given}")
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
    limits = ("max_num_seqs", "max_num_batched_tokens")
    given = {name: getattr(args, name) for name in limits if getattr(args, name) is not None}
    config = msgspec.structs.replace(setup.config, **given)
    if args.block_size is not None and args.trace.endswith(SUFFIX):
        raise EngineError(
            "--block-size cannot be changed for a dump: its prompts are recorded as hashes of blocks"
        )
    block_size = args.block_size or setup.cache_config.block_size
    return msgspec.structs.replace(
        setup,
        config=config,
        cache_config=msgspec.structs.replace(setup.cache_config, block_size=block_size),
        max_model_len=args.max_model_len or setup.max_model_len,
        num_blocks=args.num_blocks or setup.num_blocks,
    )


def _print_json(
    results: dict[tuple[SchedulingPolicy, int], SimulationResult], step_time: StepTimeModel
) -> None:
    for (policy, num_replicas), result in results.items():
        line = {"policy": policy, "replicas": num_replicas, **result.summary()}
        print(json.dumps({**line, "step_time_s": step_time._asdict()}))


def _print_table(
    results: dict[tuple[SchedulingPolicy, int], SimulationResult], step_time: StepTimeModel
) -> None:
    print(
        f"a step: {1e3 * step_time.base:.3f} ms + {1e6 * step_time.per_token:.2f} µs a token + "
        f"{1e6 * step_time.per_sequence:.2f} µs a sequence + "
        f"{1e9 * step_time.per_kv_token:.2f} ns a cached token"
    )
    rows = [["policy", "replicas", *(name.replace("_per_s", "/s") for name in COLUMNS)]]
    for (policy, num_replicas), result in results.items():
        summary = result.summary()
        values = [f"{summary[name]:.1f}".removesuffix(".0") for name in COLUMNS]
        rows.append([policy, str(num_replicas), *values])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
