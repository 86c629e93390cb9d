"""The command `engine bench` and its subcommands: serve, throughput, latency and compare."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from ....protocol.errors import ConfigError, EngineError, counted
from ...supervisor.console import Console, reports_errors
from ..parsers import add_option, command_parser
from ..remote.server import find_api_key
from ..remote.target import Target, add_target_arguments, open_target
from .datasets import DatasetName
from .options import (
    Workload,
    add_dataset_arguments,
    add_figure_arguments,
    add_request_arguments,
    add_result_arguments,
)

if TYPE_CHECKING:
    from .figures import Figures

_STARTED: Final = (
    " With --url, any server with OpenAI's API is measured. With a MODEL and no --url, a server is "
    "started, and the flags of engine serve apply as well."
)
_LATENCY_PERCENTILES: Final = (10, 25, 50, 75, 90, 99)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine bench`, without the flags of `engine serve`."""
    parser = command_parser(
        "bench",
        "Benchmark any server that has an OpenAI-compatible API. engine bench COMMAND --help shows the "
        "flags of a command.",
        "serve|throughput|latency|compare ...",
        takes_serve_flags=True,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, usage, description, add_arguments, _) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            prog=f"engine bench {name}",
            usage=f"engine bench {name} {usage}",
            help=summary,
            description=description,
            allow_abbrev=False,
        )
        add_arguments(command)
        command.set_defaults(parser=command)
    return parser


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Measure and show the results. Return 0, or 1 if requests failed; invalid arguments exit with code 2."""
    parsed, arguments = make_parser().parse_known_args(argv)
    try:
        return _COMMANDS[parsed.command][-1](parsed, arguments)
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise EngineError(
            "engine bench needs aiohttp; install it with: pip install engine-serve[bench]"
        ) from None
    except ConfigError as error:
        Console().error(str(error))
        return 2


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    about = "Requests per second; several values are measured one after another (default: inf, all at once)"
    add_option(parser, "--request-rate", about, "R", float, [math.inf], nargs="+")
    about = "Maximum concurrent requests; several values are measured one after another (default: no limit)"
    add_option(parser, "--max-concurrency", about, "N", int, [None], nargs="+")
    _add_load_arguments(parser)
    add_dataset_arguments(parser)
    add_request_arguments(parser)
    add_figure_arguments(parser)
    add_result_arguments(parser)


def _add_load_arguments(parser: argparse.ArgumentParser) -> None:
    about = "Shape parameter of the gamma-distributed gaps between requests; 1 is a Poisson process"
    add_option(parser, "--burstiness", about, "B", float, 1.0)
    _add_warmup_argument(parser)


def _add_warmup_argument(parser: argparse.ArgumentParser) -> None:
    about = "Warm-up requests before the first measurement"
    add_option(parser, "--num-warmups", about, "N", int, 1)


def _serve(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    workload = Workload(parsed)
    points = [(rate, most) for rate in parsed.request_rate for most in parsed.max_concurrency]
    with open_target(parsed.parser, parsed, arguments) as target:
        results = [
            (
                _name_point(workload, rate, most),
                _measure(target, workload, parsed, index, rate=rate, max_concurrency=most),
            )
            for index, (rate, most) in enumerate(points)
        ]
    return _report("Serving Benchmark Result", results, parsed)


def _measure(
    target: Target,
    workload: Workload,
    parsed: argparse.Namespace,
    index: int,
    *,
    rate: float,
    max_concurrency: int | None,
) -> Figures:
    from .measure import endpoint_of, measure, warm_up

    if max_concurrency is not None and max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {max_concurrency}: must be at least 1")
    endpoint = endpoint_of(target, workload)
    if index == 0:
        warm_up(endpoint, workload, parsed.num_warmups)
    figures, _ = measure(
        endpoint,
        workload,
        label=_name_point(workload, rate, max_concurrency),
        rate=rate,
        burstiness=parsed.burstiness,
        max_concurrency=max_concurrency,
        # Each measurement has its own prompts, so that none are cached from the measurement before.
        seed_offset=index,
    )
    return figures


def _name_point(workload: Workload, rate: float, max_concurrency: int | None) -> str:
    parts = [] if math.isinf(rate) else [f"{rate:g} req/s"]
    if workload.dataset.dataset_name is DatasetName.TRACE:
        parts = ["at the times of the trace"]
    if max_concurrency is not None:
        parts.append(f"{max_concurrency} at once")
    return ", ".join(parts) or "all at once"


def _report(title: str, results: Sequence[tuple[str, Figures]], parsed: argparse.Namespace) -> int:
    from .report import format_figures, write_plot, write_results

    figures = [measured for _, measured in results]
    if not parsed.json:
        for name, measured in results:
            print(format_figures(f"{title}, {name}", measured))
    write_results(figures, as_json=parsed.json, file_name=parsed.result_filename)
    if parsed.plot is not None:
        write_plot(parsed.plot, results)
    return 1 if any(measured["failed"] for measured in figures) else 0


def _add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    _add_warmup_argument(parser)
    add_dataset_arguments(parser)
    add_request_arguments(parser)
    add_result_arguments(parser, has_plot=False)


def _throughput(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    from .report import write_results

    parsed.burstiness = 1.0
    workload = Workload(parsed)
    with open_target(parsed.parser, parsed, arguments) as target:
        figures = _measure(target, workload, parsed, 0, rate=math.inf, max_concurrency=None)
    # The keys are those of `vllm bench throughput`.
    result = {
        "elapsed_time": figures["duration"],
        "num_requests": figures["completed"],
        "failed": figures["failed"],
        "total_num_tokens": figures["total_input_tokens"] + figures["total_output_tokens"],
        "requests_per_second": figures["request_throughput"],
        "tokens_per_second": figures["total_token_throughput"],
        "output_tokens_per_second": figures["output_throughput"],
    }
    write_results([result], as_json=parsed.json, file_name=parsed.result_filename)
    if not parsed.json:
        print(
            f"Throughput: {result['requests_per_second']:.2f} requests/s, "
            f"{result['tokens_per_second']:.2f} total tokens/s, "
            f"{result['output_tokens_per_second']:.2f} output tokens/s"
        )
    if figures["failed"]:
        raise EngineError(
            f"{counted(figures['failed'], 'request')} failed: {figures['first_error']}"
        )
    return 0


def _add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    for flag, default, summary in (
        ("--batch-size", 8, "Requests sent at once"),
        ("--input-len", 32, "Prompt tokens of each request"),
        ("--output-len", 128, "Generated tokens of each request"),
        ("--num-iters", 10, "Measured batches"),
        ("--num-iters-warmup", 2, "Batches before the first measurement"),
        ("--seed", 0, "Seed of the prompts"),
    ):
        add_option(parser, flag, summary, "N", int, default)
    add_request_arguments(parser)
    add_result_arguments(parser, has_plot=False)


def _latency(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    import numpy as np

    from .measure import endpoint_of, measure
    from .report import write_results

    for name in ("batch_size", "input_len", "output_len", "num_iters"):
        if getattr(parsed, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {getattr(parsed, name)}: must be at least 1")
    workload = Workload(
        parsed,
        num_prompts=parsed.batch_size,
        random_input_len=parsed.input_len,
        random_output_len=parsed.output_len,
    )
    latencies = []
    with open_target(parsed.parser, parsed, arguments) as target:
        endpoint = endpoint_of(target, workload)
        for index in range(-parsed.num_iters_warmup, parsed.num_iters):
            figures, _ = measure(
                endpoint,
                workload,
                label=f"batch {index + 1} of {parsed.num_iters}" if index >= 0 else "warming up",
                seed_offset=index,
            )
            if figures["failed"]:
                raise EngineError(
                    f"{counted(figures['failed'], 'request')} failed: {figures['first_error']}"
                )
            if index >= 0:
                latencies.append(figures["duration"])
    percentiles = {p: float(np.percentile(latencies, p)) for p in _LATENCY_PERCENTILES}
    result = {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": percentiles,
    }
    write_results([result], as_json=parsed.json, file_name=parsed.result_filename)
    if not parsed.json:
        print(f"Avg latency: {result['avg_latency']:.4f} seconds")
        for p, value in percentiles.items():
            print(f"{p}% percentile latency: {value:.4f} seconds")
    return 0


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "urls", metavar="URL", nargs="+", help="Server URLs; the first is the baseline"
    )
    about = "API key; $OPENAI_API_KEY or $ENGINE_API_KEY if not given"
    add_option(parser, "--api-key", about, "KEY")
    about = "Model of each server, or one for all servers (default: the first model that each server lists)"
    add_option(parser, "--model", about, "NAME", default=[], action="append")
    add_option(parser, "--rounds", "Measurements per server", "N", int, 3)
    about = "Requests per second (default: inf, all at once)"
    add_option(parser, "--request-rate", about, "R", float, math.inf)
    add_option(
        parser, "--max-concurrency", "Maximum concurrent requests (default: no limit)", "N", int
    )
    _add_load_arguments(parser)
    add_dataset_arguments(parser)
    add_request_arguments(parser)
    add_figure_arguments(parser)
    add_result_arguments(parser)


def _compare(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    from .compare import compare_servers, format_comparison
    from .report import write_comparison, write_results

    if arguments:
        raise ConfigError(f"unrecognized arguments: {' '.join(arguments)}")
    if len(parsed.urls) < 2:
        raise ConfigError(f"{parsed.urls[0]}: give at least two URLs to compare")
    if parsed.rounds < 1:
        raise ConfigError(f"--rounds {parsed.rounds}: must be at least 1")
    if len(parsed.model) not in (0, 1, len(parsed.urls)):
        raise ConfigError(
            f"--model is given {counted(len(parsed.model), 'time')} for {len(parsed.urls)} URLs; give one, or one for "
            "each URL"
        )
    result = compare_servers(
        parsed.urls,
        parsed.model,
        find_api_key(parsed.api_key),
        Workload(parsed),
        rounds=parsed.rounds,
        rate=parsed.request_rate,
        burstiness=parsed.burstiness,
        max_concurrency=parsed.max_concurrency,
        num_warmups=parsed.num_warmups,
    )
    write_results([result], as_json=parsed.json, file_name=parsed.result_filename)
    if not parsed.json:
        print(format_comparison(result))
    if parsed.plot is not None:
        medians = [server["median"] for server in result["servers"]]
        write_comparison(parsed.plot, parsed.urls, medians)
    rounds = [measured for server in result["servers"] for measured in server["rounds"]]
    return 1 if any(measured["failed"] for measured in rounds) else 0


_COMMANDS: Final[
    dict[
        str,
        tuple[
            str,
            str,
            str,
            Callable[[argparse.ArgumentParser], None],
            Callable[[argparse.Namespace, Sequence[str]], int],
        ],
    ]
] = {
    "serve": (
        "measure throughput and latencies under a load",
        "[MODEL] [--url URL] [flags]",
        "Measure the throughput and the latencies of a server under a load, at a rate or with a number of "
        "clients." + _STARTED,
        _add_serve_arguments,
        _serve,
    ),
    "throughput": (
        "measure the throughput of requests that are sent all at once",
        "[MODEL] [--url URL] [flags]",
        "Measure the throughput of a server that receives all requests at once." + _STARTED,
        _add_throughput_arguments,
        _throughput,
    ),
    "latency": (
        "measure how long a batch of requests takes",
        "[MODEL] [--url URL] [flags]",
        "Measure how long a batch of requests of equal length takes." + _STARTED,
        _add_latency_arguments,
        _latency,
    ),
    "compare": (
        "measure several servers in alternation",
        "URL URL... [flags]",
        (
            "Measure several servers in alternation with the same requests, and compare the "
            "medians of the rounds."
        ),
        _add_compare_arguments,
        _compare,
    ),
}
