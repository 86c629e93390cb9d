"""What is counted of one core, and how the counts of several frontends become one."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from ..protocol.config import EngineConfig
from ..protocol.messages import CoreReady, FinishReason, SchedulerStats
from .histogram import Histogram

logger = logging.getLogger(__name__)


class CoreMetrics(msgspec.Struct):
    """What one frontend knows of one core and of its own sequences there.

    `stats_time` is when the gauges of `stats` came, in CLOCK_MONOTONIC seconds, 0.0 for never: a core tells
    only one of its frontends.
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

    def add(self, other: CoreMetrics) -> None:
        """Count what another frontend has counted of the same core."""
        _add(self.counters, other.counters)
        _add(self.num_finished, other.num_finished)
        _add(self.num_rejected, other.num_rejected)
        for name, histogram in self.histograms.items():
            histogram.add(other.histograms[name])
        self.num_frames_dropped_there += other.num_frames_dropped_there
        self.num_frames_dropped_here += other.num_frames_dropped_here
        if other.stats_time > self.stats_time:
            self.stats, self.stats_time = other.stats, other.stats_time


def _add(counts: dict[Any, int], others: dict[Any, int]) -> None:
    for name in counts:
        counts[name] += others[name]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[CoreMetrics]).decode


class SharedMetrics:
    """The metrics of all frontends of an engine: each keeps a copy of its own in the run directory.

    They share a port, so a scrape reaches any one of them and must find the counts of all. A frontend that takes the
    place of a dead one counts on from the last copy, so that no count ever falls.
    """

    def __init__(self, config: EngineConfig, client_index: int) -> None:
        def path(index: int) -> Path:
            return Path(config.run_dir) / f"frontend{index}.metrics"

        count = config.parallel.api_server_count
        self._own = path(client_index)
        self._others = [path(index) for index in range(count) if index != client_index]
        self._has_failed = False

    def inherit(self) -> list[CoreMetrics] | None:
        """What this frontend's predecessor had counted, if there was one."""
        return _read(self._own)

    def publish(self, cores: list[CoreMetrics]) -> None:
        """Show the other frontends, and a successor, these counts. While the disk is full they see the last copy."""
        scratch = self._own.with_suffix(".new")
        try:
            scratch.write_bytes(_encode(cores))
            os.replace(scratch, self._own)
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "the metrics could not be written to %s: %s; those that other frontends tell are old until they can",
                    self._own.parent,
                    error.strerror,
                )
            self._has_failed = True
        else:
            self._has_failed = False

    def total(self, cores: list[CoreMetrics]) -> list[CoreMetrics]:
        """`cores` with what the other frontends have published."""
        self.publish(cores)
        if not self._others:
            return cores
        totals = _decode(_encode(cores))
        for path in self._others:
            theirs = _read(path)
            if theirs is not None:
                for total, core in zip(totals, theirs, strict=True):
                    total.add(core)
        return totals


def _read(path: Path) -> list[CoreMetrics] | None:
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        return None
