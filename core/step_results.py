"""What the outputs of steps do to the requests that were in them."""

from __future__ import annotations

from collections import deque

from ..protocol.arrays import Int32Array, int32_view
from ..protocol.errors import EngineError
from ..protocol.messages import (
    EngineCoreOutputs,
    EventKind,
    FinishReason,
    ModelRunnerOutput,
    RowLogprobs,
    SchedulerOutput,
    TokenLogprobs,
)
from .batch import Batch, StepInFlight
from .request import Request
from .request_lifecycle import RequestLifecycle


class StepResults:
    """Takes in outputs in the order of their steps; rows whose request has left meanwhile count for nothing."""

    def __init__(self, lifecycle: RequestLifecycle) -> None:
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._slots = lifecycle.running.slots
        self._clients = lifecycle.clients
        self._in_flight: deque[StepInFlight] = deque()

    @property
    def is_anything_expected(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    def expect(self, step: StepInFlight) -> None:
        """A step was sent."""
        self._in_flight.append(step)

    def expected(self, step: int) -> StepInFlight:
        """The step in flight of that number."""
        return next(sent for sent in self._in_flight if sent.step == step)

    def take(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput, now: float
    ) -> tuple[StepInFlight, dict[int, EngineCoreOutputs]]:
        """Take in the oldest step's output. Returns that step, and what each client is to be told."""
        step = self._pop(scheduler_output, output)
        token_ids = int32_view(output.sampled_token_ids)
        if self._lifecycle.transfers is not None:
            self._lifecycle.transfers.take(step, output.kv_connector_output, now)
        if output.failed_slots:
            owners = step.batch.owners(self._slots)
            for slot, message in output.failed_slots:
                if slot in owners:
                    self._lifecycle.fail(owners[slot], message)
        if output.logprobs or output.prompt_logprobs or output.nan_slots:
            self._take_row_reports(step, output)
        sampling = step.sampling
        if sampling.num_vacated != self._slots.num_vacated:
            alive = sampling.alive(self._slots)
            if not alive.all():
                sampling, token_ids = sampling.select(alive), token_ids[alive]
        if len(token_ids):
            self._take_tokens(step, sampling, token_ids, now)
        return step, self._clients.take(sampling, token_ids, now, self._lifecycle.make_stats)

    def _pop(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> StepInFlight:
        step = self._in_flight[0] if self._in_flight else None
        if step is None or not step.step == scheduler_output.step == output.step:
            raise EngineError(
                f"output of step {output.step} for step {scheduler_output.step}, "
                f"expected step {step.step if step else 'none'}"
            )
        num_tokens = len(output.sampled_token_ids) // 4
        if num_tokens != len(step.sampling):
            raise EngineError(
                f"step {step.step} returned {num_tokens} tokens for {len(step.sampling)} rows"
            )
        return self._in_flight.popleft()

    def _take_row_reports(self, step: StepInFlight, output: ModelRunnerOutput) -> None:
        owners = step.batch.owners(self._slots)
        for slot in int32_view(output.nan_slots).tolist():
            if (request := owners.get(slot)) is not None and not request.is_corrupted:
                request.is_corrupted = True
                self._lifecycle.stats.num_corrupted_requests += 1
        for row in output.logprobs:
            if (request := owners.get(row.slot)) is not None:
                outbox = self._clients[request.client_index]
                outbox.logprobs.append(_token_logprobs(request, row))
        for row in output.prompt_logprobs:
            if (request := owners.get(row.slot)) is not None and not request.has_sampled:
                request.prompt_logprobs.append(_token_logprobs(request, row))

    def _take_tokens(
        self, step: StepInFlight, sampling: Batch, token_ids: Int32Array, now: float
    ) -> None:
        may_end = self._slots.append_output(sampling.slots, token_ids)
        for row in step.prefilled:
            if row.is_alive and not row.request.has_sampled:
                self._take_first_token(row.request, now)
        if len(may_end):
            slots = sampling.slots[may_end]
            num_output = self._slots.num_output_tokens[slots]
            is_full = (num_output >= self._slots.max_output_tokens[slots]).tolist()
            ends = zip(
                slots.tolist(),
                token_ids[may_end].tolist(),
                num_output.tolist(),
                is_full,
                strict=True,
            )
            for slot, *end in ends:
                self._check_stop(self._running[slot], *end)
        for row in step.constrained:
            if row.is_alive:
                self._advance_grammar(row.request)

    def _take_first_token(self, request: Request, now: float) -> None:
        request.has_sampled = True
        self._clients.event(request, EventKind.FIRST_TOKEN, now)
        if request.prompt_logprobs:
            self._clients[request.client_index].prompt_logprobs += request.prompt_logprobs
            request.prompt_logprobs = []

    def _check_stop(self, request: Request, token_id: int, num_output: int, is_full: bool) -> None:
        if token_id in request.stop_token_ids and num_output >= request.params.min_tokens:
            stop_reason = None if token_id in request.eos_token_ids else token_id
            self._lifecycle.finish(request, FinishReason.STOP, stop_reason=stop_reason)
        elif is_full:
            self._lifecycle.finish(request, FinishReason.LENGTH)

    def _advance_grammar(self, request: Request) -> None:
        token_id = int(self._slots.output_token_ids(request.slot)[-1])
        if not self._lifecycle.grammars.accept(request, (token_id,)):
            message = f"token {token_id} was generated against the grammar"
            self._lifecycle.finish(request, FinishReason.ERROR, message=message)


def _token_logprobs(request: Request, row: RowLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        request.request_index, row.num_positions, row.token_ids, row.logprobs, row.ranks
    )
