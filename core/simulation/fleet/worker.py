"""A simulated worker: how many tokens each step samples."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from ....protocol.arrays import int32_bytes
from ....protocol.worker_messages import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from ...state.request import RequestKey
from ..draft_model import DraftModel


class SentStep(NamedTuple):
    """A step in flight.

    `num_rows` rows sample a token. If workers draft, `keys`, `slots` and `num_drafts` have an entry for each of these
    rows: its request, its slot and the number of its scheduled drafts (None without any).
    """

    step: SchedulerOutput
    num_rows: int
    keys: Sequence[RequestKey] = ()
    slots: Sequence[int] = ()
    num_drafts: Sequence[int] | None = None
    may_propose: bool = False


class Worker:
    """Samples as many tokens in each step as a real worker, which may verify drafts, would.

    Random choices depend on the request alone, so that policies are compared under equal conditions.
    """

    def __init__(self, drafts: DraftModel | None, *, is_async: bool) -> None:
        self._model = drafts
        self._is_async = is_async
        self._proposed: dict[RequestKey, int] = {}
        self._chances: dict[RequestKey, random.Random] = {}
        self.num_drafts = self.num_accepted = 0

    def execute(self, sent: SentStep) -> ModelRunnerOutput:
        """Return the output of a step. Steps must be executed in order."""
        number, count = sent.step.step, sent.num_rows
        if self._model is None:
            return ModelRunnerOutput(number, bytes(4 * count))
        num_verified = sent.num_drafts or [0] * count
        if self._is_async:
            # Asynchronous steps verify only drafts that were found before the step ran.
            found = [self._proposed.get(key, 0) for key in sent.keys]
            num_verified = list(map(min, num_verified, found))
        accepted = [
            self._model.accept(self._chance(key), verified)
            for key, verified in zip(sent.keys, num_verified, strict=True)
        ]
        self.num_drafts += sum(num_verified)
        self.num_accepted += sum(accepted)
        num_sampled = [each + 1 for each in accepted]
        output = ModelRunnerOutput(number, bytes(4 * sum(num_sampled)))
        if sent.num_drafts is not None:
            output.num_sampled = int32_bytes(num_sampled)
            if self._is_async:
                output.num_verified = int32_bytes(num_verified)
        output.drafts = self._propose(sent)
        return output

    def remove_request(self, key: RequestKey) -> None:
        """Remove the state of an ended request."""
        self._proposed.pop(key, None)
        self._chances.pop(key, None)

    def _propose(self, sent: SentStep) -> DraftTokenIds | None:
        assert self._model is not None
        counts = []
        for key in sent.keys:
            count = 0
            if sent.may_propose:
                count = self._model.propose(self._chance(key), self._proposed.get(key, 0) > 0)
            self._proposed[key] = count
            counts.append(count)
        if not any(counts):
            return None
        return DraftTokenIds(
            sent.step.step, int32_bytes(sent.slots), int32_bytes(counts), bytes(4 * sum(counts))
        )

    def _chance(self, key: RequestKey) -> random.Random:
        chance = self._chances.get(key)
        if chance is None:
            chance = self._chances[key] = random.Random(key[1])
        return chance
