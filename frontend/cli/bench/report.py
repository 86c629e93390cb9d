"""Print the results of benchmarks as text or JSON, and draw them as SVG."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ....protocol.errors import EngineError
from .figures import LATENCIES, Figures
from .svg import draw

_WIDTH: Final = 60
_COUNTS: Final = (
    ("Successful requests", "completed", "d"),
    ("Failed requests", "failed", "d"),
    ("Maximum request concurrency", "max_concurrency", "d"),
    ("Peak concurrent requests", "max_concurrent_requests", "d"),
    ("Benchmark duration (s)", "duration", ".2f"),
    ("Total input tokens", "total_input_tokens", "d"),
    ("Input tokens found in a prefix cache", "cached_tokens", "d"),
    ("Total generated tokens", "total_output_tokens", "d"),
    ("Request throughput (req/s)", "request_throughput", ".2f"),
    ("Request goodput (req/s)", "request_goodput", ".2f"),
    ("Output token throughput (tok/s)", "output_throughput", ".2f"),
    ("Total token throughput (tok/s)", "total_token_throughput", ".2f"),
)


def format_figures(title: str, figures: Figures) -> str:
    """Return the figures of one measurement as text."""
    lines = [f" {title} ".center(_WIDTH, "=")]
    for name, key, form in _COUNTS:
        if figures.get(key) is not None:
            lines.append(_line(name, figures[key], form))
    for name, meaning in LATENCIES.items():
        lines.append(f" {meaning} ".center(_WIDTH, "-"))
        lines += [
            _line(f"{_statistic_of(key, name)} {name.upper()} (ms)", value, ".2f")
            for key, value in figures.items()
            if key.endswith(f"_{name}_ms") and not key.startswith("std_") and value is not None
        ]
    if error := figures.get("first_error"):
        lines.append(f"The first failure: {error}")
    return "\n".join([*lines, "=" * _WIDTH])


def _statistic_of(key: str, name: str) -> str:
    """Return the statistic in a key: `Median` for `median_ttft_ms`, `P99` for `p99_ttft_ms`."""
    return key.removesuffix(f"_{name}_ms").capitalize()


def _line(name: str, value: Any, form: str) -> str:
    return f"{name + ':':<44}{value:>16{form}}"


def write_results(results: Sequence[Figures], *, as_json: bool, file_name: str | None) -> None:
    """Write the results as JSON lines: to stdout if `as_json`, and to the file `file_name` if it is not None.

    Raises:
        EngineError: The file cannot be written.
    """
    text = "".join(json.dumps(result) + "\n" for result in results)
    if as_json:
        print(text, end="")
    if file_name is not None:
        _write(file_name, text)


def write_plot(file_name: str, points: Sequence[tuple[str, Figures]]) -> None:
    """Draw measurements of one server: throughput, and the distribution of each latency.

    Args:
        file_name: The SVG file.
        points: Name of each measurement -> its figures.

    Raises:
        EngineError: The file cannot be written.
    """
    charts = [
        _chart(
            "Throughput",
            "tokens per second",
            points,
            {"generated": "output_throughput", "all": "total_token_throughput"},
        )
    ]
    for name, meaning in LATENCIES.items():
        keys = {
            _statistic_of(key, name): key
            for key in points[0][1]
            if key.endswith(f"_{name}_ms") and not key.startswith("std_")
        }
        charts.append(_chart(meaning, "milliseconds", points, keys))
    _write(file_name, draw(*charts))


def write_comparison(file_name: str, names: Sequence[str], medians: Sequence[Figures]) -> None:
    """Draw the medians of several servers side by side. Raise EngineError if the file cannot be written."""
    groups = {
        "tokens per second": ("output_throughput",),
        "milliseconds": tuple(
            f"{kind}_{name}_ms" for name in LATENCIES for kind in ("median", "p99")
        ),
    }
    charts = []
    for unit, keys in groups.items():
        present = [key for key in keys if key in medians[0]]
        series = [
            {"name": name, "values": [figures.get(key) for key in present]}
            for name, figures in zip(names, medians, strict=True)
        ]
        charts.append(
            {
                "title": "Throughput" if len(keys) == 1 else "Latency",
                "unit": unit,
                "points": [_short(key) for key in present],
                "series": series,
                "machine": platform.node(),
                "date": medians[0].get("date", ""),
            }
        )
    _write(file_name, draw(*charts))


def _short(key: str) -> str:
    return key.removesuffix("_ms").removesuffix("_throughput").replace("_", " ")


def _chart(
    title: str, unit: str, points: Sequence[tuple[str, Figures]], keys: dict[str, str]
) -> dict[str, Any]:
    return {
        "title": title,
        "unit": unit,
        "points": [name for name, _ in points],
        "series": [
            {"name": name, "values": [figures[key] for _, figures in points]}
            for name, key in keys.items()
        ],
        "machine": points[0][1]["model_id"],
        "date": points[0][1]["date"],
    }


def _write(file_name: str, text: str) -> None:
    try:
        Path(file_name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise EngineError(f"cannot write {file_name}: {error.strerror}") from None
