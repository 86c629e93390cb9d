"""What the scheduler remembers of the steps it has sent."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from ..protocol.arrays import BoolArray, Int32Array, Int64Array, int32_bytes
from .request import Request
from .slots import SlotArray, Slots


class ClientRows(NamedTuple):
    """Rows of one client: their positions and request indices as int32 bytes."""

    client_index: int
    positions: SlotArray | slice
    request_indices: bytes


class Batch:
    """The rows of a step and the requests in them. Consecutive steps with the same rows share one object.

    Every row is alive while `num_vacated` equals that of `Slots`.
    """

    def __init__(self, slots: SlotArray, state: Slots) -> None:
        self.slots = slots
        self.num_vacated = state.num_vacated
        self._generations: Int64Array = state.generation[slots]
        self._client_index: Int32Array = state.client_index[slots]
        self._request_index: Int32Array = state.request_index[slots]

    def __len__(self) -> int:
        return len(self.slots)

    def alive(self, state: Slots) -> BoolArray:
        """Which rows still belong to the request they were scheduled for."""
        alive: BoolArray = state.generation[self.slots] == self._generations
        return alive

    def select(self, positions: SlotArray | BoolArray) -> Batch:
        """The batch of some of the rows, as they were when this one was made."""
        rows = object.__new__(Batch)
        rows.slots = self.slots[positions]
        rows.num_vacated = self.num_vacated
        rows._generations = self._generations[positions]
        rows._client_index = self._client_index[positions]
        rows._request_index = self._request_index[positions]
        return rows

    def owners(self, state: Slots) -> dict[int, Request]:
        """The requests that still have the slot they were scheduled in, by slot."""
        slots = self.slots[self.alive(state)].tolist()
        owners = zip(slots, map(state.requests.__getitem__, slots), strict=True)
        return {slot: request for slot, request in owners if request is not None}

    @cached_property
    def slot_bytes(self) -> bytes:
        return int32_bytes(self.slots)

    @cached_property
    def clients(self) -> list[ClientRows]:
        """The rows by client."""
        clients = self._client_index
        if len(clients) == 0:
            return []
        if (clients == clients[0]).all():
            return [ClientRows(int(clients[0]), slice(None), self._request_index.tobytes())]
        rows = []
        for client_index in np.unique(clients).tolist():
            positions = (clients == client_index).nonzero()[0]
            indices = self._request_index[positions].tobytes()
            rows.append(ClientRows(client_index, positions, indices))
        return rows


class Tenure(msgspec.Struct, frozen=True, gc=False):
    """A request from one admission until it leaves its slot, with the drafts that a step verifies of it.

    `draft_token_ids` is None while only the workers know them.
    """

    request: Request
    num_admissions: int
    num_drafts: int = 0
    draft_token_ids: list[int] | None = None

    @property
    def is_alive(self) -> bool:
        request = self.request
        return request.slot >= 0 and request.num_admissions == self.num_admissions


class StepInFlight(msgspec.Struct, frozen=True, gc=False):
    """A step sent to the workers whose output is still to come.

    `sampling` are the rows that sample, in batch order. `prefilled` are the requests that get their first token
    since their admission, `constrained` those of the step's `grammar_slots`, `loading` those for which a KV connector
    loads blocks in this step. `num_drafts` counts the drafts of each row that samples; None if there are none.
    """

    step: int
    batch: Batch
    sampling: Batch
    prefilled: list[Tenure]
    constrained: list[Tenure]
    scheduled_at: float
    has_prefill: bool
    loading: list[Tenure]
    num_drafts: Int64Array | None
