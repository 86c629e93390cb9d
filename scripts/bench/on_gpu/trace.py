"""What a profiler saw on the device: how long nothing ran there, and what took how long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LONG_GAP_US = 5.0
NUM_KERNELS = 20


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel or a copy, in microseconds."""

    name: str
    start: float
    end: float


def summary(spans: Iterable[Span], num_steps: int) -> dict[str, Any]:
    """The idle shares of the time from the first span to the last, and what took most, for one of `num_steps`.

    Raises ValueError if there are no spans.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    if not ordered:
        raise ValueError("the profiler saw nothing on the device")
    reached = first = ordered[0].start
    idle = long_idle = 0.0
    took: dict[str, list[float]] = defaultdict(list)
    for span in ordered:
        gap = span.start - reached
        if gap > 0:
            idle += gap
            long_idle += gap if gap > LONG_GAP_US else 0.0
        reached = max(reached, span.end)
        took[span.name].append(span.end - span.start)
    whole = reached - first
    longest = sorted(took.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]
    return {
        "idle": idle / whole,
        f"idle in gaps over {LONG_GAP_US:g} us": long_idle / whole,
        "launches": len(ordered) / num_steps,
        "step_us": whole / num_steps,
        "us": {
            name[:80]: f"{sum(times) / num_steps:.1f} in {len(times) / num_steps:g}"
            for name, times in longest
        },
    }
