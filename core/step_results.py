"""What the outputs of steps do to the requests that were in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from ..protocol.arrays import Int32Array, Int64Array, int32_view
from ..protocol.errors import EngineError
from ..protocol.messages import (
    DraftTokenIds,
    EngineCoreOutputs,
    EventKind,
    FinishReason,
    ModelRunnerOutput,
    RowLogprobs,
    SchedulerOutput,
    SchedulerStats,
    SpecDecodingStats,
    TokenLogprobs,
)
from .batch import Batch, StepInFlight, Tenure
from .drafts import Drafts
from .quarantine import Accused
from .request import Request
from .request_lifecycle import End, RequestLifecycle
from .verification import cut_after_stops, subtract_rejections

_STOP: Final = FinishReason.STOP
_LENGTH: Final = FinishReason.LENGTH
_ERROR: Final = FinishReason.ERROR
_FIRST_TOKEN: Final = EventKind.FIRST_TOKEN

STEPS_A_REPORT: Final = 8
"""Statistics go with every so many-th step, and with those that compute prompts or are the last in flight."""


class StepResults:
    """Takes in outputs in the order of their steps. Rows that their request has left meanwhile are ignored."""

    def __init__(self, lifecycle: RequestLifecycle, drafts: Drafts | None) -> None:
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._slots = lifecycle.running.slots
        self._clients = lifecycle.clients
        self._drafts = drafts
        self._last_batch: tuple[int, Batch | None] = 0, None
        self._in_flight: deque[StepInFlight] = deque()

    @property
    def is_anything_expected(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    def find_accused(self) -> Accused:
        """The requests in the steps in flight."""
        accused = Accused([], [], [])
        rows = [row for step in self._in_flight for row in step.prefilled if row.is_alive]
        new = {row.request.key for row in rows}
        new.update(self._running[slot].key for slot in self._running.prefilling)
        for step in self._in_flight:
            for request in step.batch.owners(self._slots).values():
                if request.key in self._lifecycle.quarantine.suspects:
                    accused.convicts.append(request.key)
                elif request.key in new:
                    accused.suspects.append(request.key)
                else:
                    accused.bystanders.append(request.key)
        return Accused(*(list(dict.fromkeys(keys)) for keys in accused))

    def expect(self, step: StepInFlight) -> None:
        """A step was sent."""
        self._in_flight.append(step)

    def expected(self, step: int) -> StepInFlight:
        """The step in flight of that number."""
        return next(sent for sent in self._in_flight if sent.step == step)

    def last_in_flight(self, count: int) -> list[StepInFlight]:
        """The last steps in flight, at most `count`."""
        return list(self._in_flight)[-count:]

    def take(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput, now: float
    ) -> tuple[StepInFlight, dict[int, EngineCoreOutputs]]:
        """Take in the oldest step's output. Returns that step, and what each client is to be told."""
        step = self._pop(scheduler_output, output)
        if self._drafts is not None:
            self._last_batch = step.step, step.batch
        is_reported = step.has_prefill or step.step % STEPS_A_REPORT == 0 or not self._in_flight
        make_stats = self._lifecycle.make_stats if is_reported else None
        if not self._is_plain(step, output) or not self._slots.append_alike(
            step.sampling.slots, output.sampled_token_ids
        ):
            return step, self._take_rows(step, output, now, make_stats)
        return step, self._clients.take(
            step.sampling, output.sampled_token_ids, None, now, make_stats
        )

    def _is_plain(self, step: StepInFlight, output: ModelRunnerOutput) -> bool:
        """Whether each request of the step got one more token, runs on, and nothing else has happened."""
        return not (
            step.sampling.num_vacated != self._slots.num_vacated
            or step.prefilled
            or step.constrained
            or output.failed_slots
            or output.logprobs
            or output.prompt_logprobs
            or output.nan_slots
            or output.drafts is not None
            or step.num_drafts is not None
            or (self._drafts is not None and self._drafts.are_any)
            or self._lifecycle.transfers is not None
        )

    def _take_rows(
        self,
        step: StepInFlight,
        output: ModelRunnerOutput,
        now: float,
        make_stats: Callable[[], SchedulerStats] | None,
    ) -> dict[int, EngineCoreOutputs]:
        token_ids = int32_view(output.sampled_token_ids)
        if self._lifecycle.transfers is not None:
            self._lifecycle.transfers.take(step, output.kv_connector_output, now)
        if output.failed_slots:
            owners = step.batch.owners(self._slots)
            failed = {owners[slot]: why for slot, why in output.failed_slots if slot in owners}
            self._lifecycle.fail_all(failed)
        sampling, num_drafts = step.sampling, step.num_drafts
        counts = num_verified = None
        if num_drafts is not None:
            counts = _num_sampled(output, len(num_drafts))
            num_verified = _num_verified(output, num_drafts)
        if sampling.num_vacated != self._slots.num_vacated:
            alive = sampling.alive(self._slots)
            if not alive.all():
                sampling = sampling.select(alive)
                if counts is None or num_drafts is None or num_verified is None:
                    token_ids = token_ids[alive]
                else:
                    token_ids = token_ids[np.repeat(alive, counts)]
                    counts, num_drafts = counts[alive], num_drafts[alive]
                    num_verified = num_verified[alive]
        cut: dict[int, int] = {}
        if counts is not None and num_drafts is not None and num_verified is not None:
            if self._lifecycle.stats.spec_decoding is None:
                self._lifecycle.stats.spec_decoding = SpecDecodingStats()
            stats = self._lifecycle.stats.spec_decoding
            subtract_rejections(self._running, sampling, counts, num_drafts, num_verified, stats)
            sampled = cut_after_stops(self._running, sampling, token_ids, counts)
            token_ids, counts, cut = sampled
        if output.logprobs or output.prompt_logprobs or output.nan_slots:
            self._take_row_reports(step, output, cut)
        if len(token_ids):
            self._take_tokens(step, sampling, token_ids, counts, now)
        if self._drafts is not None:
            self._drafts.forget(sampling.slots)
            if output.drafts is not None:
                self._drafts.propose(step.batch, output.drafts)
            self._drafts.force(step)
        return self._clients.take(sampling, token_ids.tobytes(), counts, now, make_stats)

    def take_drafts(self, drafts: DraftTokenIds) -> None:
        """Take in drafts that come after the output of their step; they are late when another one has come in."""
        step, batch = self._last_batch
        if self._drafts is not None and batch is not None and step == drafts.step:
            self._drafts.propose_late(batch, drafts)

    def _pop(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> StepInFlight:
        """The step that this output belongs to. Raises EngineError if that is not the oldest one."""
        step = self._in_flight[0] if self._in_flight else None
        if step is None or not step.step == output.step == scheduler_output.step:
            raise EngineError(
                f"output of step {output.step} for step {scheduler_output.step}, "
                f"expected step {step.step if step else 'none'}"
            )
        num_tokens = len(output.sampled_token_ids) // 4
        if step.num_drafts is not None:
            counts = _num_sampled(output, len(step.num_drafts))
            if (
                len(counts) != len(step.num_drafts)
                or counts.sum() != num_tokens
                or (counts < 1).any()
                or (counts > _num_verified(output, step.num_drafts) + 1).any()
            ):
                raise EngineError(
                    f"step {step.step} returned {num_tokens} tokens, {counts.tolist()} for rows "
                    f"with {step.num_drafts.tolist()} drafts"
                )
        elif num_tokens != len(step.sampling.slots):
            raise EngineError(
                f"step {step.step} returned {num_tokens} tokens for {len(step.sampling)} rows"
            )
        return self._in_flight.popleft()

    def _take_row_reports(
        self, step: StepInFlight, output: ModelRunnerOutput, cut: dict[int, int]
    ) -> None:
        owners = step.batch.owners(self._slots)
        for slot in int32_view(output.nan_slots).tolist():
            if (request := owners.get(slot)) is None:
                continue
            if not request.is_corrupted:
                request.is_corrupted = True
                self._lifecycle.stats.num_corrupted_requests += 1
            if not request.has_untrusted_blocks:
                self._lifecycle.distrust(request)
        for row in output.logprobs:
            if (request := owners.get(row.slot)) is not None:
                outbox = self._clients[request.client_index]
                num_kept = cut.get(row.slot, row.num_positions)
                outbox.logprobs.append(_token_logprobs(request, _first_positions(row, num_kept)))
        for row in output.prompt_logprobs:
            if (request := owners.get(row.slot)) is not None and not request.has_sampled:
                request.prompt_logprobs = request.prompt_logprobs or []
                request.prompt_logprobs.append(_token_logprobs(request, row))

    def _take_tokens(
        self,
        step: StepInFlight,
        sampling: Batch,
        token_ids: Int32Array,
        counts: Int64Array | None,
        now: float,
    ) -> None:
        if counts is None:
            may_end = self._slots.append_output(sampling.slots, token_ids)
        else:
            may_end = self._slots.append_outputs(sampling.slots, counts, token_ids)
            token_ids = token_ids[np.cumsum(counts) - 1]
        if step.prefilled:
            self._take_first_tokens([row.request for row in step.prefilled if row.is_alive], now)
        ends: list[End] = []
        if len(may_end):
            slots = sampling.slots[may_end]
            num_output = self._slots.num_output_tokens[slots]
            is_full = (num_output >= self._slots.max_output_tokens[slots]).tolist()
            rows = zip(
                slots.tolist(),
                token_ids[may_end].tolist(),
                num_output.tolist(),
                is_full,
                strict=True,
            )
            ends = self._find_stops(rows)
        if step.constrained:
            num_new = dict.fromkeys(sampling.slots.tolist(), 1)
            if counts is not None:
                num_new = dict(zip(num_new, counts.tolist(), strict=True))
            refused = self._advance_grammars(step.constrained, num_new)
            # A grammar in error allows the end of the sequence alone, which is no end of what it describes.
            ends = [end for end in ends if end[0] not in refused]
            ends += [(request, _ERROR, None, message) for request, message in refused.items()]
        if ends:
            self._lifecycle.finish_all(ends)

    def _take_first_tokens(self, prefilled: list[Request], now: float) -> None:
        """Requests got their first token since they were admitted."""
        quarantine = self._lifecycle.quarantine
        if quarantine.suspects:
            for request in prefilled:
                quarantine.release(request)
        requests = [request for request in prefilled if not request.has_sampled]
        self._clients.events(requests, _FIRST_TOKEN, now)
        for request in requests:
            request.has_sampled = True
            if request.prompt_logprobs:
                self._clients[request.client_index].prompt_logprobs += request.prompt_logprobs
                request.prompt_logprobs = None

    def _find_stops(self, rows: Iterable[tuple[int, int, int, bool]]) -> list[End]:
        """The requests that end, of rows (slot, last token, number of output tokens, whether it is the limit)."""
        requests = self._slots.requests
        ends: list[End] = []
        for slot, token_id, num_output, is_full in rows:
            request = requests[slot]
            assert request is not None
            if request.stops_at(token_id, num_output):
                stop_reason = None if token_id in request.eos_token_ids else token_id
                ends.append((request, _STOP, stop_reason, ""))
            elif is_full:
                ends.append((request, _LENGTH, None, ""))
        return ends

    def _advance_grammars(
        self, rows: Iterable[Tenure], num_new: dict[int, int]
    ) -> dict[Request, str]:
        """Advance by the new tokens of each slot. Returns a message for each request whose grammar refuses them."""
        refused: dict[Request, str] = {}
        for row in rows:
            request = row.request
            if not row.is_alive:
                continue
            token_ids = self._slots.output_token_ids(request.slot)[
                -num_new[request.slot] :
            ].tolist()
            if not self._lifecycle.grammars.accept(request, token_ids):
                tokens = ", ".join(map(str, token_ids))
                refused[request] = f"token {tokens} was generated against the grammar"
        return refused


def _num_sampled(output: ModelRunnerOutput, num_rows: int) -> Int64Array:
    """The tokens of each row that sampled: one, unless the output says otherwise."""
    if not output.num_sampled:
        return np.ones(num_rows, np.int64)
    return int32_view(output.num_sampled).astype(np.int64)


def _num_verified(output: ModelRunnerOutput, num_drafts: Int64Array) -> Int64Array:
    """The drafts of each row that were verified. Raises EngineError if that cannot be, `num_drafts` being scheduled."""
    if not output.num_verified:
        return num_drafts
    num_verified = int32_view(output.num_verified).astype(np.int64)
    if len(num_verified) != len(num_drafts) or (num_verified > num_drafts).any():
        raise EngineError(
            f"step {output.step} verified {num_verified.tolist()} drafts of rows with {num_drafts.tolist()}"
        )
    return num_verified


def _first_positions(row: RowLogprobs, count: int) -> RowLogprobs:
    if count == row.num_positions:
        return row
    width = len(row.token_ids) // row.num_positions
    return RowLogprobs(
        row.slot,
        count,
        row.token_ids[: count * width],
        row.logprobs[: count * width],
        row.ranks[: count * 4],
    )


def _token_logprobs(request: Request, row: RowLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        request.request_index, row.num_positions, row.token_ids, row.logprobs, row.ranks
    )
