"""Draws simulated fleets and the frontier of cost and latency as an SVG image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .capacity import Objective, Point, find_frontier
from .plot import COLORS, HEIGHT, MARGIN, WIDTH

SHOWN_RATIOS = (0.1, 20.0)
"""The range of the vertical axis: the longest latency as a multiple of its limit."""


def draw_frontier(points: Sequence[Point], objectives: Sequence[Objective]) -> str:
    """Return an SVG image: replicas across, the longest latency as a multiple of its limit upwards."""
    most = max(point.num_replicas for point in points) + 1
    low, high = map(math.log10, SHOWN_RATIOS)

    def x(num_replicas: int) -> float:
        return MARGIN + WIDTH * num_replicas / most

    def y(ratio: float) -> float:
        shown = math.log10(min(max(ratio, SHOWN_RATIOS[0]), SHOWN_RATIOS[1]))
        return MARGIN + HEIGHT * (high - shown) / (high - low)

    bottom = MARGIN + HEIGHT
    slo = ", ".join(f"{each.name} {1e3 * each.seconds:g} ms" for each in objectives)
    frontier = find_frontier(points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 2 * MARGIN}" height="{bottom + 80}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH + 2 * MARGIN}" height="{bottom + 80}" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN - 16}" font-weight="bold">{escape(slo)}</text>',
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<rect x="{MARGIN}" y="{y(1):.1f}" width="{WIDTH}" height="{bottom - y(1):.1f}" fill="#009e73" '
        'fill-opacity="0.1"/>',
    ]
    parts += [
        f'<path d="M{MARGIN} {y(ratio):.1f}H{MARGIN + WIDTH}" stroke="#ddd"/>'
        f'<text x="{MARGIN - 4}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio:g} ×</text>'
        for ratio in (0.1, 0.5, 1, 2, 5, 10)
    ]
    parts += [
        f'<text x="{x(number):.1f}" y="{bottom + 16}" text-anchor="middle">{number}</text>'
        for number in range(0, most + 1, max(1, most // 8))
    ]
    parts += [
        f'<circle cx="{x(point.num_replicas):.1f}" cy="{y(point.ratio):.1f}" r="3" fill="#999"/>'
        for point in points
        if math.isfinite(point.ratio)
    ]
    best = min(points, key=lambda point: point.rank)
    if best.meets:
        chosen = best.candidate
        limits = f"{chosen.max_num_seqs} seqs, {chosen.max_num_batched_tokens} tokens"
        at_x, at_y = x(best.num_replicas), y(best.ratio)
        parts += [
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="6" fill="#009e73"/>',
            f'<text x="{at_x:.1f}" y="{at_y + 20:.1f}" text-anchor="middle">{limits}</text>',
        ]
    places = " ".join(f"{x(each.num_replicas):.1f},{y(each.ratio):.1f}" for each in frontier)
    parts += [
        f'<polyline points="{places}" fill="none" stroke="{COLORS[0]}" stroke-width="2"/>',
        f'<text x="{MARGIN + WIDTH / 2}" y="{bottom + 36}" text-anchor="middle">replicas</text>',
        f'<text x="{MARGIN}" y="{bottom + 56}">upwards: the longest latency as a multiple of its limit</text>',
        f'<text x="{MARGIN}" y="{bottom + 72}">line: the frontier; green: all objectives are met; dot: the fewest replicas</text>',
        "</svg>",
        "",
    ]
    return "\n".join(parts)
