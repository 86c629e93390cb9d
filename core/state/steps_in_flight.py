"""The steps in flight, and the preempted requests that wait for tokens from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from ...protocol.arrays import int32_view
from ...protocol.worker_messages import DraftTokenIds
from .batch import Batch, StepInFlight
from .request import Request


class PreemptedRow(NamedTuple):
    """A preempted request with tokens in flight up to step `last_step`.

    `slot` and `generation` identify its rows in the steps. `blocks` are the blocks that it had, in case a KV connector
    reports that some are invalid. `drafts` (int32) are the last drafts proposed for it, which a later step in flight
    may verify.
    """

    request: Request
    slot: int
    generation: int
    last_step: int
    blocks: Collection[int]
    drafts: bytes


class StepsInFlight:
    """The steps in flight in the order of sending, and the requests that were preempted during these steps."""

    def __init__(self) -> None:
        self.steps: deque[StepInFlight] = deque()
        self.preempted: list[PreemptedRow] = []

    def find_last_step(self, slot: int, generation: int) -> int:
        """Return the last step in flight that computes for a scheduled row; 0 if none does."""
        steps = reversed(self.steps)
        return next((s.step for s in steps if s.batch.find_row(slot, generation) >= 0), 0)

    def find_last_sampling_step(self, slot: int, generation: int) -> int:
        """Return the last step in flight that samples for a scheduled row; 0 if none does."""
        steps = reversed(self.steps)
        return next((s.step for s in steps if s.sampling.find_row(slot, generation) >= 0), 0)

    def find_preempted_rows(self, batch: Batch) -> list[tuple[int, Request]]:
        """Return (position in the batch, request) for preempted requests that wait for the tokens of this batch."""
        rows = [(batch.find_row(row.slot, row.generation), row.request) for row in self.preempted]
        return [(position, request) for position, request in rows if position >= 0]

    def get_drafts(self, request: Request) -> bytes:
        """Return the last drafts of a preempted request, int32."""
        return next((row.drafts for row in self.preempted if row.request is request), b"")

    def store_drafts(self, sampling: Batch, drafts: DraftTokenIds | None) -> None:
        """For preempted requests that sampled in a step, store the drafts that were proposed after it."""
        proposed: dict[int, bytes] = {}
        if drafts is not None:
            token_ids = int32_view(drafts.token_ids)
            ends = np.cumsum(int32_view(drafts.num_tokens))
            pieces = np.split(token_ids, ends[:-1])
            slots = int32_view(drafts.slots).tolist()
            proposed = {s: p.tobytes() for s, p in zip(slots, pieces, strict=True)}
        self.preempted = [
            row._replace(drafts=proposed.get(row.slot, b""))
            if sampling.find_row(row.slot, row.generation) >= 0
            else row
            for row in self.preempted
        ]

    def has_earlier_preempted(self, request: Request) -> bool:
        """Return whether a preempted request that still waits for tokens precedes `request` in the queue's order."""
        place = request.rank, request.arrival
        return any((row.request.rank, row.request.arrival) < place for row in self.preempted)

    def pop_completed(self, step: int) -> list[Request]:
        """Remove and return the preempted requests whose last tokens arrived with a step."""
        ended = [row.request for row in self.preempted if row.last_step <= step]
        if ended:
            self.preempted = [row for row in self.preempted if row.last_step > step]
        return ended
