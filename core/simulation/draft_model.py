"""A model of how many drafts a worker finds and how many are correct, fitted to a log, for simulations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...protocol.arrays import int32_list, int32_view
from ...protocol.worker_messages import ModelRunnerOutput, SchedulerOutput
from ..replay.dump import Dump
from ..replay.events import Schedule, Update
from ..replay.replayer import Replayer
from ..scheduler.step_rows import StepRows
from ..state.slots import SlotArray


class DraftModel(NamedTuple):
    """Probabilities of drafts and of their acceptance.

    `after_none[k]` is the probability that k drafts are found after a token that had none, and `after_some[k]` after a
    token that had some: repetitive text tends to continue. `acceptance[i]` is the probability that draft i is correct
    if all drafts before it are; later drafts have the last probability.
    """

    after_none: Sequence[float]
    after_some: Sequence[float]
    acceptance: Sequence[float]

    def propose(self, rng: random.Random, had_drafts: bool) -> int:
        """Return how many drafts follow a row's last token."""
        chances = self.after_some if had_drafts else self.after_none
        return rng.choices(range(len(chances)), chances)[0]

    def accept(self, rng: random.Random, num_verified: int) -> int:
        """Return how many of a row's drafts are correct."""
        last = len(self.acceptance) - 1
        for position in range(num_verified):
            if last < 0 or rng.random() >= self.acceptance[min(position, last)]:
                return position
        return num_verified


def constant_drafts(share: float, acceptance: float, most: int) -> DraftModel:
    """Return a model that finds `most` drafts after a share of the tokens, with a constant acceptance."""
    chances = [1 - share, *[0.0] * (most - 1), share]
    return DraftModel(chances, chances, [acceptance])


def measure_drafts(dumps: Iterable[Dump]) -> DraftModel | None:
    """Return a model fitted to the drafts in the logs, or None if no logged server used drafts."""
    fit = _Fit()
    has_drafts = False
    for dump in dumps:
        if dump.setup.config.speculative is not None:
            has_drafts = True
            for segment in dump.segments:
                if segment.is_whole:
                    fit.read(Replayer(dump.setup, segment))
    return fit.model() if has_drafts else None


class _Fit:
    """Counts of proposals and acceptances."""

    def __init__(self) -> None:
        self._proposals: tuple[Counter[int], Counter[int]] = Counter(), Counter()
        self._num_reached: Counter[int] = Counter()
        self._num_accepted: Counter[int] = Counter()

    def read(self, replayer: Replayer) -> None:
        """Count the drafts of a segment."""
        rows = StepRows(replayer.scheduler.last_slots)
        sent: dict[int, tuple[SchedulerOutput, SlotArray]] = {}
        last_found: dict[int, bool] = {}
        for moment in replayer.run():
            match moment.event:
                case Schedule() if moment.step is not None:
                    rows.read(moment.step)
                    sent[moment.step.step] = moment.step, rows.slots
                    for data in moment.step.new_requests:
                        last_found.pop(data.slot, None)
                case Update(result=result, num_tokens=num_tokens):
                    known = sent.pop(result.step, None)
                    if known is not None:
                        step, slots = known
                        self._count_accepted(step, result)
                        if (len(result.num_sampled) // 4 or num_tokens) == len(slots):
                            # Workers propose nothing in a step with a partial prompt.
                            self._count_proposals(slots.tolist(), result, last_found)

    def _count_accepted(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        if not step.drafts or not result.num_sampled:
            # Without `num_sampled` the worker verified no draft.
            return
        scheduled = int32_view(step.drafts).reshape(-1, 2)
        num_sampled = int32_view(result.num_sampled)
        if result.num_verified:
            verified = int32_view(result.num_verified)
        else:
            verified = np.zeros(len(num_sampled), np.int32)
            positions, counts = scheduled[scheduled[:, 0] < len(verified)].T
            verified[positions] = counts
        for sampled, count in zip(num_sampled.tolist(), verified.tolist(), strict=True):
            accepted = sampled - 1
            self._num_reached.update(range(min(accepted + 1, count)))
            self._num_accepted.update(range(accepted))

    def _count_proposals(
        self, slots: list[int], result: ModelRunnerOutput, last_found: dict[int, bool]
    ) -> None:
        found: dict[int, int] = {}
        if result.drafts is not None:
            counts = int32_list(result.drafts.num_tokens)
            found = dict(zip(int32_list(result.drafts.slots), counts, strict=True))
        for slot in slots:
            count = found.get(slot, 0)
            self._proposals[last_found.get(slot, False)][count] += 1
            last_found[slot] = count > 0

    def model(self) -> DraftModel:
        """Return the model for the counts."""
        after_none, after_some = self._proposals
        return DraftModel(
            _shares(after_none),
            _shares(after_some or after_none),
            [
                self._num_accepted[position] / self._num_reached[position]
                for position in sorted(self._num_reached)
            ],
        )


def _shares(counts: Counter[int]) -> list[float]:
    total = counts.total()
    if not total:
        return [1.0]
    return [counts[number] / total for number in range(max(counts) + 1)]
