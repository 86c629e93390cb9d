"""The `engine plan` command: find the replicas and batch limits that meet latency objectives at the least cost."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence

from ...protocol.config import ParallelConfig, SchedulingPolicy
from ...protocol.errors import EngineError, counted
from .arguments import (
    TRACE_HELP,
    Inputs,
    add_input_arguments,
    add_option,
    list_of,
    policies_of,
    positive,
    read_inputs,
)
from .capacity import Candidate, Objective, Point, Search, find_frontier, parse_objectives
from .fleet.remote_prefill import PrefillReplicas
from .plan_plot import draw_frontier
from .plot import write_plot

SCALES = (1.0, 0.5, 0.25, 2.0)
"""Multiples of the recorded limits that are tried by default."""

SHOWN = 12
"""Maximum points in the table."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Return 0, 1 if nothing meets the objectives, 2 if an argument or a file is invalid, or 130 after Ctrl-C.
    """
    args = make_parser().parse_args(argv)
    try:
        objectives = parse_objectives(args.slo)
        inputs = read_inputs(args)
        prefill = PrefillReplicas(
            min_tokens=args.remote_prefill_tokens, seconds_per_token=1 / args.transfer_rate
        )
        search = Search(inputs, objectives, args.max_replicas, prefill, _show_progress)
        best = search.run(_candidates(args, inputs))
    except EngineError as error:
        print(f"engine plan: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if sys.stderr.isatty():
            print(end="\r\x1b[K", file=sys.stderr)
    points = sorted(search.points.values(), key=lambda point: point.rank)
    if not points:
        print("engine plan: no combination of the limits is valid", file=sys.stderr)
        return 2
    if args.json:
        frontier = find_frontier(points)
        for point in points:
            print(json.dumps(_describe(point, objectives, is_on_frontier=point in frontier)))
    else:
        _print_table(points, objectives)
        print(_conclusion(best, points[0], objectives, args.max_replicas))
    if args.plot:
        try:
            write_plot(args.plot, draw_frontier(points, objectives))
        except EngineError as error:
            print(f"engine plan: {error}", file=sys.stderr)
            return 2
    return 0 if best is not None else 1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine plan`."""
    parser = argparse.ArgumentParser(
        prog="engine plan",
        description=(
            "Simulate a trace to find the fewest replicas, and their batch limits, that meet latency "
            "objectives."
        ),
    )
    parser.add_argument("--trace", metavar="TRACE", required=True, help=TRACE_HELP)
    parser.add_argument(
        "--slo",
        metavar="NAME=TIME,...",
        required=True,
        help="Objectives: percentiles of ttft, itl and e2e, such as ttft_p95=500ms,itl_p95=40ms",
    )
    add_input_arguments(parser)
    about = "Maximum number of replicas to try (default: 64)"
    add_option(parser, "--max-replicas", about, "N", positive, 64)
    about = "Scheduling policies to try (default: the recorded one, or fcfs)"
    add_option(parser, "--policy", about, "P,P", list_of(SchedulingPolicy))
    about = "Values to try (default: the recorded one, and 2, 1/2 and 1/4 times that)"
    for name in ("--max-num-seqs", "--max-num-batched-tokens"):
        add_option(parser, name, about, "N,N", list_of(positive))
    about = "Values to try (default: the recorded one)"
    add_option(parser, "--long-prefill-token-threshold", about, "N,N", list_of(_whole_or_none))
    about = "Values to try; 0 is unlimited (default: the recorded one)"
    add_option(parser, "--prefill-step-ms", about, "MS,MS", list_of(_time_or_none))
    about = "Fractions of replicas to dedicate to prefill (default: 0)"
    add_option(parser, "--prefill-share", about, "X,X", list_of(_share), [0.0])
    least = ParallelConfig().remote_prefill_tokens
    about = "Minimum uncached prompt tokens for prefill on a prefill replica (default: %(default)s)"
    add_option(parser, "--remote-prefill-tokens", about, "N", positive, least)
    about = (
        "Prompt tokens per second whose keys and values can be sent to a decode replica (default: "
        "unlimited)"
    )
    add_option(parser, "--transfer-rate", about, "TOKENS_PER_S", positive, math.inf)
    add_option(parser, "--plot", "Plot replicas and latency of each fleet in this SVG file", "FILE")
    return parser


def _candidates(args: argparse.Namespace, inputs: Inputs) -> list[Candidate]:
    """Return the settings to try, the recorded ones first."""
    config = inputs.setup.config

    def scaled(recorded: int) -> list[int]:
        return list(dict.fromkeys(max(1, int(scale * recorded)) for scale in SCALES))

    return [
        Candidate(*values)
        for values in itertools.product(
            policies_of(inputs.setup, args.policy),
            args.max_num_seqs or scaled(config.max_num_seqs),
            args.max_num_batched_tokens or scaled(config.max_num_batched_tokens),
            args.long_prefill_token_threshold or [config.long_prefill_token_threshold],
            args.prefill_step_ms or [config.prefill_step_ms],
            args.prefill_share,
        )
    ]


def _whole_or_none(text: str) -> int:
    return positive(text) if text != "0" else 0


def _time_or_none(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"must be at least 0, got {value}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise ValueError(f"must be at least 0 and below 1, got {value}")
    return value


def _show_progress(point: Point) -> None:
    if sys.stderr.isatty():
        limits = " ".join(map(str, point.candidate))
        print(
            f"\r\x1b[K{counted(point.num_replicas, 'replica')}, {limits}: {point.ratio:.2f} of the objectives",
            end="",
            file=sys.stderr,
            flush=True,
        )


def _describe(
    point: Point, objectives: Sequence[Objective], *, is_on_frontier: bool
) -> dict[str, object]:
    values = zip(objectives, point.values, strict=True)
    return {
        "replicas": point.num_replicas,
        "prefill_replicas": point.num_prefill,
        **point.candidate.limits(),
        **{f"{objective.name}_ms": round(1e3 * value, 3) for objective, value in values},
        "output_tokens_per_s": round(point.output_tokens_per_s, 1),
        "meets": point.meets,
        "is_on_frontier": is_on_frontier,
    }


def _print_table(points: Sequence[Point], objectives: Sequence[Objective]) -> None:
    """Print the best points. If several limits have equal results, only the first of them are shown."""
    distinct = {(each.num_replicas, each.num_prefill, each.values): each for each in points[::-1]}
    shown = [point for point in points if point in distinct.values()][:SHOWN]
    names = [f"{objective.name} ms" for objective in objectives]
    rows = [
        [
            "replicas",
            "prefill",
            "policy",
            "seqs",
            "batched",
            "long prefill",
            "step ms",
            *names,
            "tokens/s",
            "meets",
        ]
    ]
    for point in shown:
        limits = [
            f"{value:g}" if isinstance(value, float) else str(value)
            for value in point.candidate.limits().values()
        ]
        values = [f"{1e3 * value:.1f}" for value in point.values]
        rate = f"{point.output_tokens_per_s:.1f}"
        meets = "yes" if point.meets else "no"
        counts = [str(point.num_replicas), str(point.num_prefill)]
        rows.append([*counts, *limits, *values, rate, meets])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))
    if len(shown) < len(points):
        print(f"{len(points) - len(shown)} other fleets are worse or equal; --json prints all")


def _conclusion(
    best: Point | None, nearest: Point, objectives: Sequence[Objective], max_replicas: int
) -> str:
    if best is None:
        return (
            f"nothing meets the objectives with up to {counted(max_replicas, 'replica')}; the nearest needs "
            f"{nearest.ratio:.2f} times as long"
        )
    predicted = ", ".join(
        f"{objective.name} {1e3 * value:.1f} ms ({value / objective.seconds:.0%} of the limit)"
        for objective, value in zip(objectives, best.values, strict=True)
    )
    flags = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in best.candidate.limits().items()
        if name != "policy"
    ]
    replicas = f"--data-parallel-size {best.num_replicas}"
    if best.num_prefill:
        num_decode = best.num_replicas - best.num_prefill
        replicas = f"--replica-roles prefill={best.num_prefill},decode={num_decode}"
    return (
        f"predicted: {predicted}\nfewest replicas: engine serve {replicas} "
        f"--scheduling-policy {best.candidate.policy} {' '.join(flags)}"
    )


if __name__ == "__main__":
    sys.exit(main())
