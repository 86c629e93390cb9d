"""Small bar graphs made of text characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

BARS: Final = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float], most: float | None = None) -> str:
    """Return a bar for each value, scaled from 0 to `most` (by default the largest value)."""
    values = list(values)
    top = max(values, default=0.0) if most is None else most
    if top <= 0:
        return BARS[0] * len(values)
    steps = len(BARS) - 1
    return "".join(BARS[min(steps, max(0, round(value / top * steps)))] for value in values)
