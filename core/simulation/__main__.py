"""The `engine simulate TRACE` command: run a trace on a number of replicas in virtual time."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence

import msgspec

from ...protocol.config import SchedulingPolicy
from ...protocol.errors import EngineError, counted
from .arguments import (
    TRACE_HELP,
    add_input_arguments,
    add_option,
    list_of,
    policies_of,
    positive,
    read_inputs,
)
from .plot import draw, write_plot
from .simulate import SimulationResult, simulate
from .step_time import StepTimeModel

LIMITS = ("max_num_seqs", "max_num_batched_tokens")

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
    """Run the command. Return 0, 2 if an argument or a file is invalid, or 130 after Ctrl-C."""
    args = make_parser().parse_args(argv)
    try:
        inputs = read_inputs(args)
        given = {name: getattr(args, name) for name in LIMITS if getattr(args, name) is not None}
        results = {}
        for policy, num_replicas in itertools.product(
            policies_of(inputs.setup, args.policy), args.replicas
        ):
            config = msgspec.structs.replace(inputs.setup.config, policy=policy, **given)
            results[policy, num_replicas] = simulate(
                msgspec.structs.replace(inputs.setup, config=config),
                inputs.trace,
                inputs.step_time,
                num_replicas,
                inputs.drafts,
                inputs.frontend,
            )
        if args.json:
            _print_json(results, inputs.step_time)
        else:
            _print_table(results, inputs.step_time)
        if args.plot:
            named = {
                f"{policy}, {counted(n, 'replica')}": result
                for (policy, n), result in results.items()
            }
            write_plot(args.plot, draw(named))
    except EngineError as error:
        print(f"engine simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine simulate`."""
    parser = argparse.ArgumentParser(
        prog="engine simulate",
        description="Run the scheduler over a trace in virtual time, with step times fitted to a recorded log.",
    )
    parser.add_argument("trace", metavar="TRACE", help=TRACE_HELP)
    add_input_arguments(parser)
    about = "Scheduling policies to compare (default: the recorded one, or fcfs)"
    add_option(parser, "--policy", about, "P,P", list_of(SchedulingPolicy))
    about = "Numbers of replicas to compare (default: 1)"
    add_option(parser, "--replicas", about, "N,N", list_of(positive), [1])
    for name, about in (
        (
            "--max-num-seqs",
            "Maximum requests that run at once in each replica (default: as recorded)",
        ),
        ("--max-num-batched-tokens", "Maximum tokens per step (default: as recorded)"),
    ):
        add_option(parser, name, about, "N", positive)
    add_option(parser, "--plot", "Plot the latencies in this SVG file", "FILE")
    return parser


def _print_json(
    results: dict[tuple[SchedulingPolicy, int], SimulationResult], step_time: StepTimeModel
) -> None:
    for (policy, num_replicas), result in results.items():
        line = {"policy": policy, "replicas": num_replicas, **result.summary()}
        print(json.dumps({**line, "step_time_s": step_time.coefficients()}))


def _print_table(
    results: dict[tuple[SchedulingPolicy, int], SimulationResult], step_time: StepTimeModel
) -> None:
    per_prompt_token = step_time.per_prompt_token
    prompts = (
        "" if per_prompt_token is None else f"{1e6 * per_prompt_token:.2f} µs a prompt token + "
    )
    print(
        f"a step: {1e3 * step_time.base:.3f} ms + {1e6 * step_time.per_token:.2f} µs a token + {prompts}"
        f"{1e6 * step_time.per_sequence:.2f} µs a sequence + "
        f"{1e9 * step_time.per_kv_token:.2f} ns a cached token + "
        f"{1e9 * step_time.per_pair:.2f} ns an attended pair"
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
