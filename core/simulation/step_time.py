"""The time of a step as a function of its load, fitted to an event log.

A step costs a constant, its tokens, its sequences, the cached tokens that it reads, and the pairs of tokens that
attention compares. Tokens of prompts have a cost of their own, because other kernels run. Other influences, such as the
load of other processes on the same cores, are replayed from the log as the ratio of measured to fitted times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...protocol.arrays import Int64Array
from ...protocol.errors import EngineError
from ..replay.dump import Dump
from ..replay.events import Schedule, Update
from ..replay.replayer import Replayer
from ..scheduler.step_rows import StepRows
from ..state.slots import Float64Array, SlotArray, Slots

BoolArray: TypeAlias = npt.NDArray[np.bool_]

FEW_TOKENS: Final = 16
"""Sequences with more tokens in a step compute a prompt; others decode, possibly with drafts."""

SIZES: Final = (FEW_TOKENS, 64, 128, 256)
"""Largest numbers of tokens of the classes of steps that have ratios of their own; the last class has more tokens.

Short steps vary more, and the error of the fit differs from class to class.
"""

NUM_FOLDS: Final = 8
"""The log is cut into this many pieces in the order of time; each is predicted from the others."""

_NUM_REWEIGHTINGS: Final = 3


class StepLoad(NamedTuple):
    """The load of a step: computed tokens, sequences, cached tokens that are read, and attended pairs of tokens.

    `prompt_tokens` are the tokens of sequences with more than FEW_TOKENS tokens.
    """

    tokens: int
    sequences: int
    kv_tokens: int
    pairs: float = 0.0
    prompt_tokens: int = 0


class StepSample(NamedTuple):
    """A measured step, which ended at CLOCK_MONOTONIC `ended_at`."""

    load: StepLoad
    seconds: float
    ended_at: float = 0.0


class StepTimeModel(NamedTuple):
    """Coefficients in seconds: per step, per token, per sequence, per cached token and per attended pair.

    `per_prompt_token` replaces `per_token` for tokens of prompts, if it is given. `ratios` are the ratios of measured
    to fitted times of each class of SIZES, in the order of the log; a class without any has exact times.
    """

    base: float
    per_token: float
    per_sequence: float
    per_kv_token: float
    per_pair: float = 0.0
    per_prompt_token: float | None = None
    ratios: tuple[tuple[float, ...], ...] = ((),) * (len(SIZES) + 1)

    def seconds(self, load: StepLoad) -> float:
        """Return the expected time of a step with this load, in seconds."""
        per_prompt_token = self.per_prompt_token
        if per_prompt_token is None:
            per_prompt_token = self.per_token
        return (
            self.base
            + self.per_token * (load.tokens - load.prompt_tokens)
            + per_prompt_token * load.prompt_tokens
            + self.per_sequence * load.sequences
            + self.per_kv_token * load.kv_tokens
            + self.per_pair * load.pairs
        )

    def coefficients(self) -> dict[str, object]:
        """Return the coefficients by name."""
        values = self._asdict()
        return {name: values[name] for name in self._fields[:6]}


class StepClock:
    """Returns the times of one worker's steps: the model's time, multiplied by the next recorded ratio.

    A ratio is the measured time of a step in the log divided by its fitted time. Ratios are used in the order of the
    log and repeat at its end, so that simulated times vary like measured ones.

    Args:
        model: The fitted model of step times, with the ratios.
        phase: The share of the ratios, from 0 to 1, that the first step passes over.
    """

    def __init__(self, model: StepTimeModel, phase: float = 0.0) -> None:
        self._model = model
        self._ratios = [np.array(ratios) for ratios in model.ratios]
        self._next = [int(phase * len(ratios)) for ratios in self._ratios]

    def take(self, load: StepLoad) -> float:
        """Return the time of the next step, in seconds."""
        if not load.tokens:
            return 0.0
        seconds = self._model.seconds(load)
        size = bisect_left(SIZES, load.tokens)
        ratios = self._ratios[size]
        if len(ratios):
            seconds *= float(ratios[self._next[size]])
            self._next[size] = (self._next[size] + 1) % len(ratios)
        return seconds

    def peek(self, load: StepLoad, count: int) -> Float64Array:
        """Return the times of the next steps, which repeat a step of this load with contexts that grow by a token."""
        first = self._model.seconds(load)
        more = load.tokens * (self._model.per_kv_token + self._model.per_pair)
        seconds: Float64Array = first + more * np.arange(1, count + 1, dtype=np.float64)
        size = bisect_left(SIZES, load.tokens)
        ratios = self._ratios[size]
        if len(ratios):
            seconds *= ratios[(self._next[size] + np.arange(count)) % len(ratios)]
        return seconds

    def skip(self, load: StepLoad, count: int) -> StepLoad:
        """Pass over the next steps. Return the load of the last one."""
        size = bisect_left(SIZES, load.tokens)
        if len(self._ratios[size]):
            self._next[size] = (self._next[size] + count) % len(self._ratios[size])
        more = count * load.tokens
        return load._replace(kv_tokens=load.kv_tokens + more, pairs=load.pairs + more)


class FittedStepTime(NamedTuple):
    """A fitted model.

    `mean_error` is the mean absolute error of single steps, as a share of the mean step time. `held_out_error` is the
    same for parts of the log that the fit did not see, and `held_out_bias` the error of their total time.
    """

    model: StepTimeModel
    num_steps: int
    mean_error: float
    held_out_error: float
    held_out_bias: float


def measure_load(slots: SlotArray, counts: Int64Array, state: Slots) -> StepLoad:
    """Return the load of the step that was scheduled last, from its slots and tokens per row."""
    computed = state.num_computed_tokens[slots]
    pairs = float((counts * (computed - (counts - 1) / 2)).sum())
    prompt_tokens = int(counts[counts > FEW_TOKENS].sum())
    return StepLoad(int(counts.sum()), len(slots), int(computed.sum()), pairs, prompt_tokens)


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
                        seconds = now - max(known[1], last_end)
                        samples.append(StepSample(known[0], seconds, now))
                    last_end = now
    return samples


def fit(samples: Sequence[StepSample]) -> FittedStepTime:
    """Fit a model by least squares of relative errors with coefficients of at least 0.

    Raises:
        EngineError: There are no samples.
    """
    if not samples:
        raise EngineError("no step was recorded, so the step time cannot be fitted")
    loads = np.array([sample.load for sample in samples], np.float64)
    seconds = np.array([sample.seconds for sample in samples])
    features = _features(loads)
    pieces = np.arange(len(samples)) * NUM_FOLDS // len(samples)
    predicted = np.zeros(len(samples))
    for piece in range(NUM_FOLDS):
        is_held_out = pieces == piece
        known = ~is_held_out if len(samples) > 1 else is_held_out
        predicted[is_held_out] = features[is_held_out] @ _solve(features[known], seconds[known])
    solution = _solve(features, seconds)
    fitted = features @ solution
    ratios = seconds / np.maximum(fitted, 1e-9)
    sizes = np.searchsorted(SIZES, loads[:, 0])
    base, per_token, per_sequence, per_kv_token, per_pair, per_prompt_token = solution.tolist()
    model = StepTimeModel(
        base,
        per_token,
        per_sequence,
        per_kv_token,
        per_pair,
        per_prompt_token if any(sample.load.prompt_tokens for sample in samples) else None,
        tuple(tuple(ratios[sizes == size].tolist()) for size in range(len(SIZES) + 1)),
    )
    bias = float(predicted.sum() / max(seconds.sum(), 1e-9)) - 1
    mean_error, held_out_error = (_error(values, seconds) for values in (fitted, predicted))
    return FittedStepTime(model, len(samples), mean_error, held_out_error, bias)


def _features(loads: Float64Array) -> Float64Array:
    """Return the factors of the coefficients, in the order of the model's fields: [steps, coefficients]."""
    tokens, sequences, kv_tokens, pairs, prompt_tokens = loads.T
    columns = (tokens - prompt_tokens, sequences, kv_tokens, pairs, prompt_tokens)
    return np.stack([np.ones(len(loads)), *columns], 1)


def _solve(features: Float64Array, seconds: Float64Array) -> Float64Array:
    """Return the coefficients that minimize the sum of squared relative errors."""
    scale: Float64Array = features.max(0)
    scale[scale == 0] = 1
    weights = 1 / np.maximum(seconds, max(float(np.median(seconds)), 1e-9))
    for _ in range(_NUM_REWEIGHTINGS):
        # Relative to the measured times, steps that were short by chance would weigh too much.
        solution = _solve_nonnegative(features / scale * weights[:, None], seconds * weights)
        solution = solution / scale
        weights = 1 / np.maximum(features @ solution, 1e-9)
    return solution


def _solve_nonnegative(features: Float64Array, values: Float64Array) -> Float64Array:
    """Return the least-squares solution with coefficients of at least 0 (Lawson and Hanson, 1974, chapter 23)."""
    count = features.shape[1]
    solution: Float64Array = np.zeros(count)
    used: BoolArray = np.zeros(count, np.bool_)
    for _ in range(3 * count):
        gradient = features.T @ (values - features @ solution)
        gradient[used] = 0
        if gradient.max() <= 1e-9 * len(values):
            break
        used[gradient.argmax()] = True
        while True:
            trial: Float64Array = np.zeros(count)
            trial[used] = np.linalg.lstsq(features[:, used], values, rcond=None)[0]
            falling = used & (trial <= 0)
            if not falling.any():
                break
            share = (solution[falling] / (solution[falling] - trial[falling])).min()
            solution = solution + share * (trial - solution)
            used &= solution > 1e-12
            solution[~used] = 0
        solution = trial
    return solution


def _error(predicted: Float64Array, seconds: Float64Array) -> float:
    return float(np.abs(predicted - seconds).sum() / max(seconds.sum(), 1e-9))
