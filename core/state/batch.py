"""Records of the steps that were sent to the workers, kept until their outputs arrive."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from ...protocol.arrays import BoolArray, Int32Array, Int64Array, are_all, int32_bytes
from .request import Request, RequestStatus
from .slots import SlotArray, Slots


class ClientRows(NamedTuple):
    """The rows of one client in a batch: their positions, and their request indices as int32 bytes."""

    client_index: int
    positions: SlotArray | slice
    request_indices: bytes


class Batch:
    """The rows of a step, and the requests in them. Consecutive steps with the same rows share one object.

    While `num_vacated` equals `Slots.num_vacated`, every row still belongs to its request.
    """

    def __init__(self, slots: SlotArray, state: Slots) -> None:
        self.slots = slots
        self.num_vacated = state.num_vacated
        self._generations: Int64Array = state.generation[slots]
        self._client_index: Int32Array = state.client_index[slots]
        self._request_index: Int32Array = state.request_index[slots]

    def __len__(self) -> int:
        return len(self.slots)

    def is_alive(self, state: Slots) -> BoolArray:
        """Return which rows still belong to the request that they were scheduled for."""
        alive: BoolArray = state.generation[self.slots] == self._generations
        return alive

    def find_row(self, slot: int, generation: int) -> int:
        """Return the position of the row of a slot and generation, or -1 if there is none."""
        rows = ((self.slots == slot) & (self._generations == generation)).nonzero()[0]
        return int(rows[0]) if len(rows) else -1

    def select(self, positions: SlotArray | BoolArray) -> Batch:
        """Return a batch of the rows at `positions`, as they were when this batch was made."""
        rows = object.__new__(Batch)
        rows.slots = self.slots[positions]
        rows.num_vacated = self.num_vacated
        rows._generations = self._generations[positions]
        rows._client_index = self._client_index[positions]
        rows._request_index = self._request_index[positions]
        return rows

    def join(self, other: Batch) -> Batch:
        """Return a batch of these rows followed by those of another batch."""
        rows = object.__new__(Batch)
        rows.slots = np.concatenate((self.slots, other.slots))
        rows.num_vacated = self.num_vacated
        rows._generations = np.concatenate((self._generations, other._generations))
        rows._client_index = np.concatenate((self._client_index, other._client_index))
        rows._request_index = np.concatenate((self._request_index, other._request_index))
        return rows

    def get_live_requests(self, state: Slots) -> dict[int, Request]:
        """Return, by slot, the requests that still have the slot they were scheduled in."""
        slots = self.slots[self.is_alive(state)].tolist()
        owners = zip(slots, map(state.requests.__getitem__, slots), strict=True)
        return {slot: request for slot, request in owners if request is not None}

    @cached_property
    def slot_bytes(self) -> bytes:
        """The slots as int32 bytes."""
        return int32_bytes(self.slots)

    @cached_property
    def clients(self) -> list[ClientRows]:
        """The rows of each client."""
        clients = self._client_index
        if len(clients) == 0:
            return []
        if are_all(clients == clients[0]):
            return [ClientRows(int(clients[0]), slice(None), self._request_index.tobytes())]
        rows = []
        for client_index in sorted(set(clients.tolist())):
            positions = (clients == client_index).nonzero()[0]
            indices = self._request_index[positions].tobytes()
            rows.append(ClientRows(client_index, positions, indices))
        return rows


class ScheduledRow(msgspec.Struct, frozen=True, gc=False):
    """A request during one of its stays in a slot, with the drafts that a step verifies.

    `draft_token_ids` is None if only the workers have the drafts so far.
    """

    request: Request
    num_admissions: int
    num_drafts: int = 0
    draft_token_ids: list[int] | None = None

    @property
    def is_alive(self) -> bool:
        """True if the request is still in that slot, without a preemption in between."""
        request = self.request
        return request.slot >= 0 and request.num_admissions == self.num_admissions

    @property
    def is_awaited(self) -> bool:
        """True if the row's tokens are still needed, because it is alive or was preempted and waits for them."""
        request = self.request
        return request.num_admissions == self.num_admissions and (
            request.slot >= 0 or request.status is RequestStatus.PREEMPTED_IN_FLIGHT
        )


class StepInFlight(msgspec.Struct, frozen=True, gc=False):
    """A step that was sent to the workers and whose output has not arrived.

    `sampling` are the rows that sample a token, in batch order. `prefilled` are the requests that get their first token
    since their admission. `num_prompt_tokens` of the step's tokens belong to prompts. `constrained` are the rows of the
    step's `grammar_slots`. `loading` are the rows for which a KV connector loads blocks in this step. `num_drafts` is
    the number of drafts of each row that samples; None if there are no drafts. `progress` has the number of computed
    tokens of each request that reports its progress and does not get its first token yet.
    """

    step: int
    batch: Batch
    sampling: Batch
    prefilled: list[ScheduledRow]
    constrained: list[ScheduledRow]
    scheduled_at: float
    has_prefill: bool
    num_prompt_tokens: int
    loading: list[ScheduledRow]
    num_drafts: Int64Array | None
    progress: list[tuple[ScheduledRow, int]] = []
