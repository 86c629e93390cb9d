"""Summaries of a device profile: idle time, and the time of each kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

LONG_GAP_US = 5.0
NUM_KERNELS = 20


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel or a copy, with times in microseconds. Spans with the same `launch` come from one replay of a graph."""

    name: str
    start: float
    end: float
    launch: int = 0


def summary(spans: Iterable[Span], num_steps: int) -> dict[str, Any]:
    """Return the idle fractions from the first span to the last, and the longest kernels, per step.

    Idle time between steps is the time outside of replays. If there are more replays than steps, the last ones are
    used, because the profiler delays the first. Raises ValueError if there are no spans.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    if not ordered:
        raise ValueError("the profiler recorded no activity on the device")
    replays = _replays(ordered)[-num_steps:]
    if replays:
        ordered = [span for span in ordered if span.start >= replays[0].start]
    reached = first = ordered[0].start
    gaps: list[tuple[float, float]] = []
    took: dict[str, list[float]] = defaultdict(list)
    for span in ordered:
        if span.start > reached:
            gaps.append((reached, span.start))
        reached = max(reached, span.end)
        took[span.name].append(span.end - span.start)
    whole = reached - first
    longest = sorted(took.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]

    def share(gaps: Iterable[tuple[float, float]]) -> float:
        return sum(end - begin for begin, end in gaps) / whole

    between: dict[str, float] = {}
    if replays:
        outside = (
            gap for gap in gaps if not any(x.start <= gap[0] and gap[1] <= x.end for x in replays)
        )
        between = {
            "idle between steps": share(outside),
            "replays": len(replays) / num_steps,
        }
    return {
        **between,
        "idle": share(gaps),
        f"idle in gaps over {LONG_GAP_US:g} us": share(
            gap for gap in gaps if gap[1] - gap[0] > LONG_GAP_US
        ),
        "launches": len(ordered) / num_steps,
        "step_us": whole / num_steps,
        "us": {
            name[:80]: f"{sum(times) / num_steps:.1f} in {len(times) / num_steps:g}"
            for name, times in longest
        },
    }


def _replays(ordered: list[Span]) -> list[Span]:
    launched: dict[int, list[Span]] = defaultdict(list)
    for span in ordered:
        launched[span.launch].append(span)
    return [
        Span("replay", together[0].start, max(span.end for span in together), launch)
        for launch, together in launched.items()
        if launch and len(together) > 1
    ]
