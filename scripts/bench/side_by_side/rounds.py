"""Measurements in alternation, because the speed of a machine drifts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def alternate(runs: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call each function once in every round, and return its results. One more round before them warms up."""
    results: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            result = run()
            if number:
                results[name].append(result)
    return results
