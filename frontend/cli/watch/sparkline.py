"""Small graphs of text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

BARS: Final = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float], most: float | None = None) -> str:
    """Return a bar for each value, between 0 and `most`, by default the largest of them."""
    values = list(values)
    top = max(values, default=0.0) if most is None else most
    if top <= 0:
        return BARS[0] * len(values)
    steps = len(BARS) - 1
    return "".join(BARS[min(steps, max(0, round(value / top * steps)))] for value in values)
