"""Draws distributions of latencies as an SVG image."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

import numpy as np

from ...protocol.errors import EngineError
from ..state.slots import Float64Array
from .simulate import SimulationResult

WIDTH, HEIGHT = 440, 300
MARGIN = 50
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")
SHARES: Float64Array = np.linspace(0.0, 100.0, 201)


def write_plot(path: str, image: str) -> None:
    """Write an image to the file of `--plot`. Raise EngineError if it cannot be written."""
    try:
        Path(path).write_text(image, encoding="utf-8")
    except OSError as error:
        raise EngineError(f"--plot {path}: {error.strerror}") from None


def draw(results: Mapping[str, SimulationResult]) -> str:
    """Return an SVG image of the cumulative distributions of time to first token and time between tokens."""
    first = {name: result.latencies.first_token for name, result in results.items()}
    between = {name: result.latencies.inter_token for name, result in results.items()}
    height = HEIGHT + 2 * MARGIN + 18 * len(results)
    width = 2 * (WIDTH + MARGIN) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_panel("time to first token", first, MARGIN),
        *_panel("time between tokens", between, WIDTH + 2 * MARGIN),
    ]
    for row, name in enumerate(results):
        y = HEIGHT + 2 * MARGIN + 18 * row
        parts.append(
            f'<rect x="{MARGIN}" y="{y - 9}" width="20" height="4" fill="{_color(row)}"/>'
            f'<text x="{MARGIN + 28}" y="{y - 3}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, series: Mapping[str, Float64Array], left: int) -> list[str]:
    known = [values[values > 0] for values in series.values()]
    known = [values for values in known if len(values)]
    low = min((values.min() for values in known), default=1e-3)
    high = max((values.max() for values in known), default=1.0)
    first, last = np.floor(np.log10(low)), np.ceil(np.log10(high))
    last = max(last, first + 1)

    def x(seconds: Float64Array) -> Float64Array:
        exponents = np.log10(np.maximum(seconds, 10.0**first))
        place: Float64Array = left + WIDTH * (exponents - first) / (last - first)
        return place

    def y(share: Float64Array) -> Float64Array:
        return MARGIN + HEIGHT * (1 - share / 100)

    bottom = MARGIN + HEIGHT
    parts = [
        f'<text x="{left}" y="{MARGIN - 16}" font-weight="bold">{title}</text>',
        f'<rect x="{left}" y="{MARGIN}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
    ]
    for exponent in range(int(first), int(last) + 1):
        at = float(x(np.array([10.0**exponent]))[0])
        parts.append(
            f'<path d="M{at:.1f} {MARGIN}V{bottom}" stroke="#ddd"/>'
            f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{_seconds(exponent)}</text>'
        )
    for share in (0, 50, 90, 99):
        at = float(y(np.array([share]))[0])
        parts.append(
            f'<path d="M{left} {at:.1f}H{left + WIDTH}" stroke="#ddd"/>'
            f'<text x="{left - 4}" y="{at + 4:.1f}" text-anchor="end">{share} %</text>'
        )
    for row, values in enumerate(series.values()):
        if len(values):
            places = zip(x(np.percentile(values, SHARES)), y(SHARES), strict=True)
            points = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{_color(row)}" stroke-width="2"/>'
            )
    return parts


def _color(row: int) -> str:
    return COLORS[row % len(COLORS)]


def _seconds(exponent: int) -> str:
    return f"{10 ** (exponent + 3):g} ms" if exponent < 0 else f"{10**exponent:g} s"
