"""The time of a step as a linear function of its load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...protocol.arrays import Int64Array
from ...protocol.errors import EngineError
from ..replay.dump import Dump
from ..replay.events import Schedule, Update
from ..replay.replayer import Replayer
from ..scheduler.step_rows import StepRows
from ..state.slots import SlotArray, Slots


class StepLoad(NamedTuple):
    """The load of a step: computed tokens, sequences, and cached tokens that the sequences read."""

    tokens: int
    sequences: int
    kv_tokens: int


class StepSample(NamedTuple):
    """A measured step."""

    load: StepLoad
    seconds: float


class StepTimeModel(NamedTuple):
    """Coefficients in seconds: per step, per token, per sequence and per cached token."""

    base: float
    per_token: float
    per_sequence: float
    per_kv_token: float

    def seconds(self, load: StepLoad) -> float:
        """Return the time of a step with this load, in seconds."""
        return (
            self.base
            + self.per_token * load.tokens
            + self.per_sequence * load.sequences
            + self.per_kv_token * load.kv_tokens
        )


def measure_load(slots: SlotArray, counts: Int64Array, state: Slots) -> StepLoad:
    """Return the load of the step that was scheduled last, from its slots and tokens per row."""
    return StepLoad(int(counts.sum()), len(slots), int(state.num_computed_tokens[slots].sum()))


def measure_steps(dump: Dump) -> list[StepSample]:
    """Return the load and duration of every step of a log.

    A step begins when it is scheduled, or when the previous one ends if that is later.
    """
    samples = []
    for segment in dump.segments:
        if not segment.is_whole:
            continue
        replayer = Replayer(dump.setup, segment)
        rows = StepRows(replayer.scheduler.last_slots)
        sent: dict[int, tuple[StepLoad, float]] = {}
        last_end = 0.0
        for moment in replayer.run():
            match moment.event:
                case Schedule(now) if moment.step is not None:
                    counts = rows.read(moment.step)
                    load = measure_load(rows.slots, counts, replayer.scheduler.slots)
                    sent[moment.step.step] = load, now
                case Update(now, result):
                    known = sent.pop(result.step, None)
                    if known is not None and known[0].tokens:
                        samples.append(StepSample(known[0], now - max(known[1], last_end)))
                    last_end = now
    return samples


def fit(samples: Sequence[StepSample]) -> StepTimeModel:
    """Fit a model by least squares with coefficients of at least 0.

    Raises:
        EngineError: There are no samples.
    """
    if not samples:
        raise EngineError("no step was recorded, so the step time cannot be fitted")
    loads = np.array([(1, *sample.load) for sample in samples], np.float64)
    seconds = np.array([sample.seconds for sample in samples])
    scale = loads.max(0)
    scale[scale == 0] = 1
    used = list(range(loads.shape[1]))
    coefficients = np.zeros(loads.shape[1])
    while used:
        solution = np.linalg.lstsq(loads[:, used] / scale[used], seconds, rcond=None)[0]
        if (solution >= 0).all():
            coefficients[used] = solution / scale[used]
            break
        used.pop(int(solution.argmin()))
    return StepTimeModel(*coefficients.tolist())


def mean_error(model: StepTimeModel, samples: Sequence[StepSample]) -> float:
    """Return the mean absolute error as a share of the mean step time."""
    errors = [abs(model.seconds(sample.load) - sample.seconds) for sample in samples]
    return sum(errors) / max(sum(sample.seconds for sample in samples), 1e-9)
