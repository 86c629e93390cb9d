"""Search for the fewest replicas, and their batch limits, that meet service-level objectives on a trace."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ...protocol.config import SchedulingPolicy
from ...protocol.errors import ConfigError, EngineError
from .arguments import Inputs
from .fleet.remote_prefill import PrefillReplicas
from .simulate import SimulationResult, simulate

_OBJECTIVE: Final = re.compile(r"(ttft|itl|e2e)_p(\d+(?:\.\d+)?)=(\d+(?:\.\d+)?)(ms|s)")

RESOLUTION: Final = 0.05
"""Latencies that differ by less than this share of their limits count as equal, because predictions are less exact."""

MIN_GAIN: Final = 0.98
"""If twice the replicas shorten the longest latency by less than this factor, more of them are not tried."""


class Objective(NamedTuple):
    """A limit in seconds for a percentile of a latency: `ttft`, `itl` or `e2e`."""

    latency: str
    percentile: float
    seconds: float

    @property
    def name(self) -> str:
        """The name of the latency with its percentile, such as `ttft_p95`."""
        return f"{self.latency}_p{self.percentile:g}"

    def measure(self, result: SimulationResult) -> float:
        """Return the percentile in seconds; infinity if some request did not finish."""
        values = dict(zip(("ttft", "itl", "e2e"), result.latencies, strict=True))[self.latency]
        if result.num_refused or result.num_expired:
            return math.inf
        return float(np.percentile(values, self.percentile)) if len(values) else 0.0


def parse_objectives(text: str) -> list[Objective]:
    """Return the objectives of `--slo`, such as `ttft_p95=500ms,itl_p95=40ms`.

    Raises:
        EngineError: One of them has another form.
    """
    objectives = []
    for item in text.split(","):
        match = _OBJECTIVE.fullmatch(item.strip())
        if match is None or not 0 < float(match[2]) <= 100 or not float(match[3]):
            raise EngineError(
                f"--slo {item}: must be ttft, itl or e2e with a percentile and a time above 0, such as "
                "ttft_p95=500ms"
            )
        scale = 1e-3 if match[4] == "ms" else 1.0
        objectives.append(Objective(match[1], float(match[2]), scale * float(match[3])))
    return objectives


class Candidate(NamedTuple):
    """Settings to try. All except `prefill_share` have the names of fields of `SchedulerConfig`.

    `prefill_share` is the fraction of the replicas that compute long prompts for the others; 0 for none.
    """

    policy: SchedulingPolicy
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    prefill_step_ms: float
    prefill_share: float = 0.0

    def limits(self) -> dict[str, object]:
        """Return the settings of the scheduler by name."""
        values = self._asdict()
        del values["prefill_share"]
        return values

    def num_prefill(self, num_replicas: int) -> int:
        """Return how many of the replicas are prefill replicas."""
        if not self.prefill_share:
            return 0
        return min(max(round(self.prefill_share * num_replicas), 1), num_replicas - 1)


class Point(NamedTuple):
    """A simulated fleet and its latencies.

    `values` are the latencies of the objectives in seconds. `ratio` is the largest of them as a multiple of its limit,
    so the objectives are met if it is at most 1.
    """

    candidate: Candidate
    num_replicas: int
    num_prefill: int
    values: tuple[float, ...]
    ratio: float
    output_tokens_per_s: float

    @property
    def meets(self) -> bool:
        """Return whether all objectives are met."""
        return self.ratio <= 1

    @property
    def rank(self) -> tuple[bool, int, float]:
        """The sort key of a point: points that meet the objectives come first, then lower cost, then lower latency.

        If keys are equal, the point that was simulated first is the best: its limits are like the recorded ones.
        """
        is_finite = math.isfinite(self.ratio)
        ratio = round(self.ratio / RESOLUTION) if is_finite else self.ratio
        return not self.meets, self.num_replicas if self.meets else 0, ratio


class Search:
    """Simulates fleets. `points` are those simulated so far.

    Args:
        inputs: The trace, and the setup of a replica.
        objectives: The limits of latencies.
        max_replicas: The largest fleet.
        prefill: The settings of prefill replicas; their number depends on the settings that are tried.
        report: Called after each simulation.
    """

    def __init__(
        self,
        inputs: Inputs,
        objectives: Sequence[Objective],
        max_replicas: int,
        prefill: PrefillReplicas,
        report: Callable[[Point], None] = lambda point: None,
    ) -> None:
        self._inputs = inputs
        self._objectives = objectives
        self._max_replicas = max_replicas
        self._prefill = prefill
        self._report = report
        self.points: dict[tuple[Candidate, int], Point] = {}

    def run(self, candidates: Iterable[Candidate]) -> Point | None:
        """Return the cheapest point that meets the objectives, or None if none does.

        The first settings are tried with more and more replicas. All others are tried only with the number that the
        best settings need, and with fewer if that suffices: more replicas never make the latencies longer.
        """
        best: Point | None = None
        most = self._max_replicas
        for candidate in candidates:
            try:
                found = self._find_least(candidate, most, is_first=best is None)
            except ConfigError:
                # These limits contradict each other.
                continue
            if found is not None and (best is None or found.rank < best.rank):
                best, most = found, found.num_replicas
        if best is not None:
            for num_replicas in _spread(best.num_replicas, self._max_replicas):
                self.simulate(best.candidate, num_replicas)
        return best

    def simulate(self, candidate: Candidate, num_replicas: int) -> Point:
        """Return the point of a fleet."""
        known = self.points.get((candidate, num_replicas))
        if known is not None:
            return known
        inputs = self._inputs
        num_prefill = candidate.num_prefill(num_replicas)
        config = msgspec.structs.replace(inputs.setup.config, **candidate.limits())
        setup = msgspec.structs.replace(inputs.setup, config=config)
        result = simulate(
            setup,
            inputs.trace,
            inputs.step_time,
            num_replicas,
            inputs.drafts,
            inputs.frontend,
            self._prefill._replace(num_replicas=num_prefill),
        )
        values = tuple(objective.measure(result) for objective in self._objectives)
        ratios = (
            value / objective.seconds
            for value, objective in zip(values, self._objectives, strict=True)
        )
        rate = result.output_tokens / (result.seconds or 1.0)
        point = Point(candidate, num_replicas, num_prefill, values, max(ratios), rate)
        self.points[candidate, num_replicas] = point
        self._report(point)
        return point

    def _find_least(self, candidate: Candidate, most: int, *, is_first: bool) -> Point | None:
        """Return the point with the fewest replicas, at most `most`, that meets the objectives."""
        low, high = 0, 1 if is_first else most
        before = math.inf
        while not (point := self.simulate(candidate, high)).meets:
            if high == most or point.ratio > MIN_GAIN * before:
                return None
            before = point.ratio
            low, high = high, min(2 * high, most)
        while high - low > 1:
            middle = (low + high) // 2
            tried = self.simulate(candidate, middle)
            if tried.meets:
                high, point = middle, tried
            else:
                low = middle
        return point


def _spread(least: int, most: int) -> Iterator[int]:
    """Yield numbers of replicas around the least that suffices, to draw the frontier."""
    for share in (0.25, 0.5, 0.75, 1.25, 1.5):
        if 1 <= (number := round(share * least) + (share > 1)) <= most:
            yield number


def find_frontier(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other beats in both cost and latency, sorted by the number of replicas."""
    frontier: list[Point] = []
    for point in sorted(points, key=lambda each: (each.num_replicas, each.ratio)):
        if not frontier or point.ratio < frontier[-1].ratio:
            if frontier and frontier[-1].num_replicas == point.num_replicas:
                continue
            frontier.append(point)
    return frontier
