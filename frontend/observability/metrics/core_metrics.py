"""The counts of one frontend for each core, and their sum over all frontends."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ....protocol.config import EngineConfig
from ....protocol.messages import CoreReady, FinishReason, SchedulerStats
from ....protocol.store.messages import StoreState
from ....protocol.supervisor_messages import EngineStatus
from .histogram import Histogram

logger = logging.getLogger(__name__)


class CoreMetrics(msgspec.Struct):
    """The counts of one frontend for one core, and for the frontend's own sequences at that core.

    Attributes:
        stats_time: The time at which the core sent the gauges in `stats` (CLOCK_MONOTONIC seconds); 0.0 for never. A
            core sends them to only one of its frontends, and a busy frontend may read older ones later.
        num_frames_dropped_there: Messages that the core dropped.
        num_unfinished: Unfinished sequences of this frontend at all cores; only set for the first core.
        num_frames_dropped_here: Messages from the core that this frontend dropped.
    """

    counters: dict[str, int]
    histograms: dict[str, Histogram]
    num_finished: dict[FinishReason, int]
    num_rejected: dict[str, int]
    stats: SchedulerStats
    stats_time: float = 0.0
    ready: CoreReady | None = None
    num_frames_dropped_there: int = 0
    num_frames_dropped_here: int = 0
    num_accepted_per_pos: list[int] = []
    num_finished_by_lora: dict[str, int] = {}
    num_unfinished: int = 0

    def count_accepted(self, per_pos: list[int]) -> None:
        """Add the numbers of accepted draft tokens, by position among the drafts of a step."""
        counts = self.num_accepted_per_pos
        counts += [0] * (len(per_pos) - len(counts))
        for position, number in enumerate(per_pos):
            counts[position] += number

    def add_counts(self, other: CoreMetrics) -> None:
        """Add another frontend's counts for the same core. Counts that are unknown to this version are ignored."""
        _add(self.counters, other.counters)
        _add(self.num_finished, other.num_finished)
        _add(self.num_rejected, other.num_rejected)
        _add(self.num_finished_by_lora, other.num_finished_by_lora)
        self.count_accepted(other.num_accepted_per_pos)
        for name, histogram in self.histograms.items():
            added = other.histograms.get(name)
            if added is not None and added.bounds == histogram.bounds:
                histogram.add_counts(added)
        self.num_unfinished += other.num_unfinished
        self.num_frames_dropped_there += other.num_frames_dropped_there
        self.num_frames_dropped_here += other.num_frames_dropped_here
        if other.stats_time > self.stats_time:
            self.stats, self.stats_time = other.stats, other.stats_time
        self.ready = self.ready or other.ready


def _add(counts: dict[Any, int], others: dict[Any, int]) -> None:
    for name, count in others.items():
        counts[name] = counts.get(name, 0) + count


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[CoreMetrics]).decode


class SharedMetrics:
    """The metrics of all frontends of an engine.

    Frontends share a port, so a scrape reaches an arbitrary one, which must return the counts of all. Each stores its
    counts in the run directory. A restarted frontend continues from its stored counts, so that no counter decreases.
    """

    def __init__(self, config: EngineConfig, client_index: int) -> None:
        def path(index: int) -> Path:
            return Path(config.run_dir) / f"frontend{index}.metrics"

        count = config.parallel.api_server_count
        self._own = path(client_index)
        self._others = [path(index) for index in range(count) if index != client_index]
        self._published = b""
        self._has_failed = False

    def load_previous(self) -> list[CoreMetrics] | None:
        """Return the counts that this frontend had before a restart; None at the first start."""
        return _read(self._own)

    def publish(self, cores: list[CoreMetrics]) -> None:
        """Write these counts for other frontends. If that fails, they read the previous counts."""
        counts = _encode(cores)
        if counts == self._published:
            return
        scratch = self._own.with_suffix(".new")
        try:
            scratch.write_bytes(counts)
            os.replace(scratch, self._own)
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "cannot write metrics to %s: %s; other frontends will report outdated counts until "
                    "this succeeds",
                    self._own.parent,
                    error.strerror,
                )
            self._has_failed = True
        else:
            self._published, self._has_failed = counts, False

    def total(self, cores: list[CoreMetrics]) -> list[CoreMetrics]:
        """Return `cores` plus the published counts of the other frontends."""
        self.publish(cores)
        if not self._others:
            return cores
        totals = _decode(_encode(cores))
        for path in self._others:
            theirs = _read(path)
            if theirs is not None:
                for total, core in zip(totals, theirs, strict=True):
                    total.add_counts(core)
        return totals


def _read(path: Path) -> list[CoreMetrics] | None:
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        return None


class Counts(NamedTuple):
    """The sum over all frontends for each core, and the state of the engine's processes.

    Attributes:
        cores: The counts for each core.
        are_up: For each core, True while its replica can compute.
        status: The status of all processes.
        store: The state of the store.
    """

    cores: list[CoreMetrics]
    are_up: list[bool]
    status: EngineStatus
    store: StoreState
