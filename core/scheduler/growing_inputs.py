"""Append encoder inputs to requests whose audio arrives while they run, and let others use slots that wait for it."""

from __future__ import annotations

from ...protocol.messages import AppendInputs, FinishReason
from ..state.request import RUNNING, Request
from .lifecycle import RequestLifecycle


class GrowingInputs:
    """Applies the growth of requests, and preempts those that have computed all of their inputs if others need slots.

    A request that is open may compute tokens only up to the end of its inputs. With a slot, it takes no part in steps
    until more arrive. Without one, it is not in the queue until it could compute all of its tokens.
    """

    def __init__(self, lifecycle: RequestLifecycle) -> None:
        self._lifecycle = lifecycle
        self._slots = lifecycle.running.slots

    def append_inputs(self, client_index: int, message: AppendInputs) -> None:
        """Append inputs to a request. Those that it already has, and those of finished requests, are ignored."""
        request = self._lifecycle.requests.get((client_index, message.request_index))
        if request is None or not request.is_open:
            return
        new = [item for item in message.inputs if item.position >= request.num_ready_tokens]
        problem = self._lifecycle.requirements.find_unfit_growth(request.num_ready_tokens, new)
        if problem is not None:
            self._lifecycle.finish_request(request, FinishReason.ERROR, message=problem)
            return
        request.is_untouched = False
        request.encoder_inputs = [*request.encoder_inputs, *new]
        if request.status is RUNNING:
            self._lifecycle.encoders.append_inputs(request.slot, new)
        if message.is_last:
            request.has_all_inputs = True
            self._limit_output(request, request.num_ready_tokens - request.num_prompt_tokens)
        if not request.is_finished:
            self._lifecycle.end_input_wait(request)

    def _limit_output(self, request: Request, most: int) -> None:
        """Limit the output tokens of a request, or finish it if it has this many."""
        num_output = request.num_tokens - request.num_prompt_tokens
        if request.status is RUNNING:
            num_output = int(self._slots.num_output_tokens[request.slot])
        if num_output >= most:
            self._lifecycle.finish_request(request, FinishReason.LENGTH)
            return
        request.max_tokens = min(request.max_tokens or most, most)
        if request.status is RUNNING:
            self._slots.limit_output(request.slot, self._lifecycle.max_output_tokens(request))

    def vacate_idle_slot(self, now: float) -> None:
        """Preempt the first running request that waits for inputs, if there is one and no slot is free."""
        slots, lifecycle = self._slots, self._lifecycle
        if slots.num_free or not lifecycle.queue:
            return
        for slot, request in lifecycle.encoders.decoding.items():
            num_computed = int(slots.num_computed_tokens[slot])
            if request.is_open and num_computed >= request.num_ready_tokens:
                generation = int(slots.generation[slot])
                if not lifecycle.in_flight.find_last_sampling_step(slot, generation):
                    lifecycle.preempt(slot, now)
                    return
