"""Compare servers: send them the same requests in alternation, and compute medians and ratios to the first server."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from ..remote.server import RemoteServer
from ..remote.target import Target
from .figures import LATENCIES, Figures
from .measure import endpoint_of, measure, warm_up
from .options import Workload

COMPARED: Final = (
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    *(f"{kind}_{name}_ms" for name in LATENCIES for kind in ("mean", "median", "p99")),
)
"""The figures whose ratios are shown. Throughputs are better if higher, latencies if lower."""


def compare_servers(
    urls: Sequence[str],
    models: Sequence[str],
    api_key: str | None,
    workload: Workload,
    *,
    rounds: int,
    rate: float,
    burstiness: float,
    max_concurrency: int | None,
    num_warmups: int,
) -> Figures:
    """Measure the servers one after another, `rounds` times. The order is reversed in every second round.

    All servers get the same requests within a round. Each round has different requests.

    Args:
        urls: The URLs of the servers.
        models: A model for each server, one model for all servers, or none for the first model that each server lists.
        api_key: The API key that is sent to all servers, or None.
        workload: The requests of a round.
        rounds: The number of times that each server is measured.
        rate: Sessions that start per second.
        burstiness: See `arrival_times`.
        max_concurrency: Maximum number of concurrent sessions.
        num_warmups: The number of requests to each server before the measurements.

    Returns:
        `servers`, each with `url`, `model`, all `rounds` and their `median`, and `ratios`: for each figure, the values
        of all servers divided by that of the first.

    Raises:
        EngineError: A server cannot be reached, or the workload is invalid.
    """
    endpoints = []
    for index, url in enumerate(urls):
        server = RemoteServer(url, api_key)
        named = models[index % len(models)] if models else server.first_model()
        endpoints.append(endpoint_of(Target(server, named), workload))
    for endpoint in endpoints:
        warm_up(endpoint, workload, num_warmups)
    results: list[list[Figures]] = [[] for _ in endpoints]
    for number in range(rounds):
        order = list(range(len(endpoints)))
        for index in order if number % 2 == 0 else reversed(order):
            figures, _ = measure(
                endpoints[index],
                workload,
                label=f"round {number + 1} of {rounds}, {urls[index]}",
                rate=rate,
                burstiness=burstiness,
                max_concurrency=max_concurrency,
                seed_offset=number,
            )
            results[index].append(figures)
    medians = [median_of(rounds_of_server) for rounds_of_server in results]
    servers = [
        {"url": url, "model": endpoint.model, "rounds": measured, "median": median}
        for url, endpoint, measured, median in zip(urls, endpoints, results, medians, strict=True)
    ]
    return {"servers": servers, "ratios": ratios_of(medians)}


def median_of(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure over all rounds; None for a figure that no round has."""
    medians: Figures = {"date": rounds[0]["date"]}
    for key, value in rounds[0].items():
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            known = [figures[key] for figures in rounds if figures.get(key) is not None]
            medians[key] = statistics.median(known) if known else None
    return medians


def ratios_of(medians: Sequence[Figures]) -> dict[str, list[float | None]]:
    """Return each figure of each server, divided by the first server's."""
    first = medians[0]
    return {
        key: [
            figures[key] / first[key] if figures.get(key) is not None and first[key] else None
            for figures in medians
        ]
        for key in COMPARED
        if first.get(key) is not None
    }


def format_comparison(result: Figures) -> str:
    """Return a table with a row for each figure, and a column with the median and ratio of each server."""
    servers = result["servers"]
    rows = [["", *(server["url"] for server in servers)]]
    for key, ratios in result["ratios"].items():
        cells = [key]
        for server, ratio in zip(servers, ratios, strict=True):
            value = server["median"].get(key)
            shown = "" if value is None else f"{value:,.2f}"
            cells.append(shown if ratio is None else f"{shown} ({ratio:.2f})")
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    num_rounds = len(servers[0]["rounds"])
    lines.append(f"Medians of {num_rounds} rounds; in parentheses, the ratio to the first server.")
    return "\n".join(lines)
