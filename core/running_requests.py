"""The requests that hold a slot, in the order of their admission."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .batch import Tenure
from .request import Request
from .slots import SlotArray, Slots, as_array


class RunningRequests:
    """Keeps the order of `slots`, which requests still prefill, and which slots the workers must clear.

    `prefilling` maps a slot to the number of tokens its request was admitted with.
    """

    def __init__(self, slots: Slots, max_num_seqs: int) -> None:
        self.slots = slots
        self.prefilling: dict[int, int] = {}
        self.num_constrained = 0
        self.loras: dict[str, int] = {}
        """Requests by adapter; no adapter without a request."""
        self._removed: list[int] = []
        self._completed_prefills: list[Tenure] = []
        self._max_num_seqs = max_num_seqs
        self._order: SlotArray = np.zeros(max_num_seqs, np.intp)
        self._num_ordered = 0

    def __len__(self) -> int:
        return self._max_num_seqs - self.slots.num_free

    def __getitem__(self, slot: int) -> Request:
        request = self.slots.requests[slot]
        assert request is not None
        return request

    @property
    def has_removed(self) -> bool:
        """Whether slots were vacated that no step has told the workers of."""
        return bool(self._removed)

    @property
    def order(self) -> SlotArray:
        """A view of the slots in order, valid until the next one is vacated."""
        order = self._order[: self._num_ordered]
        if self._num_ordered != len(self):
            kept = order[self.slots.is_running[order]]
            self._num_ordered = len(kept)
            self._order[: self._num_ordered] = kept
            order = self._order[: self._num_ordered]
        return order

    def append(
        self,
        requests: Sequence[Request],
        num_computed_tokens: list[int],
        max_output_tokens: list[int],
    ) -> None:
        """Give requests slots at the end. A step that computes all tokens of a request samples one more.

        `max_output_tokens` count the output tokens that they have already, too.
        """
        num_tokens = as_array([request.num_tokens for request in requests])
        num_computed = as_array(num_computed_tokens)
        is_prefilled = num_computed == num_tokens
        slots = self.slots.take(
            requests, num_computed, num_tokens + is_prefilled, as_array(max_output_tokens)
        )
        first, self._num_ordered = self._num_ordered, self._num_ordered + len(slots)
        self._order[first : self._num_ordered] = slots
        for request, is_complete in zip(requests, is_prefilled.tolist(), strict=True):
            if request.params.structured_output is not None:
                self.num_constrained += 1
            if request.lora_name:
                self.loras[request.lora_name] = self.loras.get(request.lora_name, 0) + 1
            if is_complete:
                self._completed_prefills.append(Tenure(request, request.num_admissions))
            else:
                self.prefilling[request.slot] = request.num_tokens

    def remove(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._removed.append(request.slot)
            if self.prefilling:
                self.prefilling.pop(request.slot, None)
            if request.params.structured_output is not None:
                self.num_constrained -= 1
            if request.lora_name:
                self.loras[request.lora_name] -= 1
                if not self.loras[request.lora_name]:
                    del self.loras[request.lora_name]
        self.slots.vacate(requests)

    def complete_prefill(self, request: Request) -> None:
        """The step in the making samples the first token since the request's admission."""
        self.prefilling.pop(request.slot, None)
        self._completed_prefills.append(Tenure(request, request.num_admissions))

    def take_removed(self) -> list[int]:
        """The slots vacated since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def take_completed_prefills(self) -> list[Tenure]:
        completed, self._completed_prefills = self._completed_prefills, []
        return completed
