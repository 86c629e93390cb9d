"""The requests that hold a slot, in the order of their admission."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...protocol.config.diffusion import BlockDiffusion
from ...protocol.file_identity import LoraAdapter
from .batch import ScheduledRow
from .diffusion_blocks import AnswerPasses, BlockPasses, CanvasPasses
from .passes import Passes
from .request import Request
from .slots import SlotArray, Slots, as_array


class RunningRequests:
    """Tracks the admission order of `slots`, which requests are prefilling, and which slots the workers must clear.

    `prefilling` maps a slot to the number of tokens that its request had when it was admitted.
    """

    def __init__(
        self, slots: Slots, max_num_seqs: int, diffusion: BlockDiffusion | None = None
    ) -> None:
        self.slots = slots
        self.passes = _make_passes(diffusion, slots)
        self.prefilling: dict[int, int] = {}
        self.num_constrained = 0
        self.num_reporting = 0
        """The number of requests that report their progress."""
        self.awaiting_masks: set[int] = set()
        """Slots whose request has an isolated grammar that must compute a mask after the token that they sample."""
        self.loras: dict[LoraAdapter, int] = {}
        """Number of running requests per LoRA adapter in use."""
        self._removed: list[int] = []
        self._completed_prefills: list[ScheduledRow] = []
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
        """True if slots were freed that no step message has reported to the workers yet."""
        return bool(self._removed)

    @property
    def order(self) -> SlotArray:
        """A view of the slots in order of admission. Valid until the next slot is freed."""
        order = self._order[: self._num_ordered]
        if self._num_ordered != len(self):
            kept = order[self.slots.is_running[order]]
            self._num_ordered = len(kept)
            self._order[: self._num_ordered] = kept
            order = self._order[: self._num_ordered]
        return order

    def end_of_prefill(self, request: Request) -> int:
        """Return how many tokens of a waiting request are computed by the step in which it first samples."""
        return self.passes.find_end(request.num_tokens, request.num_prompt_tokens)

    def add_requests(
        self,
        requests: Sequence[Request],
        num_computed_tokens: list[int],
        max_output_tokens: list[int],
    ) -> list[int]:
        """Give requests slots, at the end of the order of admission.

        Return how many of the computed tokens of each are certain. A step that computes all tokens of a request also
        samples one more token. `max_output_tokens` includes the output tokens that the requests already have.
        """
        num_tokens = as_array([request.num_tokens for request in requests])
        num_computed = as_array(num_computed_tokens)
        num_prompt_tokens = as_array([request.num_prompt_tokens for request in requests])
        ends = self.passes.find_end(num_tokens, num_prompt_tokens)
        is_prefilled = num_computed == ends
        num_computed = self.passes.count_certain(num_computed, num_computed, ends)
        slots = self.slots.allocate_slots(
            requests,
            num_computed,
            num_tokens + is_prefilled,
            num_prompt_tokens,
            as_array(max_output_tokens),
        )
        first, self._num_ordered = self._num_ordered, self._num_ordered + len(slots)
        self._order[first : self._num_ordered] = slots
        for request, is_complete in zip(requests, is_prefilled.tolist(), strict=True):
            if request.params.structured_output is not None:
                self.num_constrained += 1
            self.num_reporting += request.params.reports_progress
            if request.lora is not None:
                self.loras[request.lora] = self.loras.get(request.lora, 0) + 1
            if is_complete:
                self._completed_prefills.append(ScheduledRow(request, request.num_admissions))
            else:
                self.prefilling[request.slot] = request.num_tokens
        certain: list[int] = num_computed.tolist()
        return certain

    def remove_requests(self, requests: Sequence[Request]) -> None:
        """Free the slots of requests."""
        for request in requests:
            self._removed.append(request.slot)
            if self.prefilling:
                self.prefilling.pop(request.slot, None)
            self.awaiting_masks.discard(request.slot)
            if request.params.structured_output is not None:
                self.num_constrained -= 1
            self.num_reporting -= request.params.reports_progress
            if request.lora is not None:
                self.loras[request.lora] -= 1
                if not self.loras[request.lora]:
                    del self.loras[request.lora]
        self.slots.vacate_slots(requests)

    def complete_prefill(self, request: Request) -> None:
        """Record that the current step samples the first token since the request's admission."""
        self.prefilling.pop(request.slot, None)
        self._completed_prefills.append(ScheduledRow(request, request.num_admissions))

    def take_removed(self) -> list[int]:
        """Return the slots freed since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def take_completed_prefills(self) -> list[ScheduledRow]:
        """Return the requests that completed their prefill since the last call."""
        completed, self._completed_prefills = self._completed_prefills, []
        return completed


def _make_passes(diffusion: BlockDiffusion | None, slots: Slots) -> Passes:
    if diffusion is None:
        return Passes(slots)
    if diffusion.answer_size:
        return AnswerPasses(diffusion.block_size, diffusion.answer_size, slots)
    kind = BlockPasses if diffusion.renoising is None else CanvasPasses
    return kind(diffusion.block_size, slots)
