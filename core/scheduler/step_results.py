"""Apply the outputs of steps: append tokens, detect stops, finish requests and build messages to clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ...protocol.arrays import Int32Array, Int64Array, are_all, int32_view
from ...protocol.errors import EngineError, counted
from ...protocol.messages import (
    EngineCoreOutputs,
    EventKind,
    FinishReason,
    PooledVector,
    SchedulerStats,
    SpecDecodingStats,
    TokenLogprobs,
)
from ...protocol.worker_messages import (
    DraftTokenIds,
    ModelRunnerOutput,
    RowLogprobs,
    SchedulerOutput,
)
from ..state.batch import Batch, ScheduledRow, StepInFlight
from ..state.diffusion_blocks import BlockPasses
from ..state.request import Request
from ..state.slots import as_array
from .features.poison_isolation import CrashSuspects
from .features.speculative import Drafts
from .features.verification import (
    VerifiedDrafts,
    cut_after_stops,
    cut_at_limits,
    subtract_rejections,
)
from .kv_transfers import KVTransfers
from .lifecycle import End, RequestLifecycle

_STOP: Final = FinishReason.STOP
_LENGTH: Final = FinishReason.LENGTH
_ERROR: Final = FinishReason.ERROR
_FIRST_TOKEN: Final = EventKind.FIRST_TOKEN

STEPS_PER_REPORT: Final = 8
"""Statistics are sent every this many steps, and after steps that compute prompts or leave no step in flight."""


class LateRow(NamedTuple):
    """The tokens of a row whose request was preempted meanwhile, and how they finish it, if they do."""

    request: Request
    position: int
    token_ids: bytes
    end: End | None


class StepResults:
    """Applies the outputs of steps, in order. Rows whose request has finished or was preempted are ignored."""

    def __init__(
        self, lifecycle: RequestLifecycle, drafts: Drafts | None, transfers: KVTransfers | None
    ) -> None:
        self._lifecycle = lifecycle
        self._running = lifecycle.running
        self._slots = lifecycle.running.slots
        self._passes = lifecycle.running.passes
        self._clients = lifecycle.clients
        self._drafts = drafts
        self._transfers = transfers
        self._last_batch: tuple[int, Batch | None] = 0, None
        self._in_flight = lifecycle.in_flight.steps

    @property
    def has_steps_in_flight(self) -> bool:
        """True if a step was sent to the workers and its output has not arrived."""
        return bool(self._in_flight)

    def find_crash_suspects(self) -> CrashSuspects:
        """Classify the requests in the steps in flight, one of which may have crashed a worker."""
        suspects_found = CrashSuspects([], [], [])
        rows = [row for step in self._in_flight for row in step.prefilled if row.is_awaited]
        new = {row.request.key for row in rows}
        new.update(self._running[slot].key for slot in self._running.prefilling)
        for step in self._in_flight:
            for request in self._owners(step).values():
                if request.key in self._lifecycle.poison_isolation.suspects:
                    suspects_found.poison_requests.append(request.key)
                elif request.key in new:
                    suspects_found.suspects.append(request.key)
                else:
                    suspects_found.unsuspected.append(request.key)
        return CrashSuspects(*(list(dict.fromkeys(keys)) for keys in suspects_found))

    def add_step(self, step: StepInFlight) -> None:
        """Record a step that is sent to the workers."""
        self._in_flight.append(step)

    def get_step(self, step: int) -> StepInFlight:
        """Return the step in flight with this number."""
        return next(sent for sent in self._in_flight if sent.step == step)

    def get_last_steps(self, count: int) -> list[StepInFlight]:
        """Return the last steps in flight, at most `count`."""
        return list(self._in_flight)[-count:]

    def apply_output(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput, now: float
    ) -> tuple[StepInFlight, dict[int, EngineCoreOutputs]]:
        """Apply the output of the oldest step. Return that step, and the messages to each client."""
        step, verified = self._pop(scheduler_output, output)
        if step.progress:
            self._clients.record_progress(step.progress, now)
        if self._drafts is not None:
            self._last_batch = step.step, step.batch
            if len(step.sampling) == len(step.batch) and not step.prefilled:
                # All requests decoded.
                num_drafts = len(output.sampled_token_ids) // 4 - len(step.batch)
                if verified is not None:
                    num_drafts = int(verified.num_verified.sum())
                self._drafts.record_step(step.step, len(step.batch) + num_drafts, output)
        is_reported = step.has_prefill or step.step % STEPS_PER_REPORT == 0 or not self._in_flight
        make_stats = self._lifecycle.make_stats if is_reported else None
        if not self._is_plain(step, output) or not self._slots.append_deferred(
            step.sampling.slots, output.sampled_token_ids
        ):
            return step, self._take_rows(step, output, verified, now, make_stats)
        self._lifecycle.step_tokens.append(len(step.sampling))
        return step, self._clients.make_step_outputs(
            step.sampling, output.sampled_token_ids, None, now, make_stats
        )

    def _is_plain(self, step: StepInFlight, output: ModelRunnerOutput) -> bool:
        """Return whether every request of the step got exactly one more token and continues."""
        return not (
            step.sampling.num_vacated != self._slots.num_vacated
            or step.prefilled
            or step.constrained
            or output.failed_slots
            or output.logprobs
            or output.prompt_logprobs
            or output.pooled
            or output.nan_slots
            or output.drafts is not None
            or step.num_drafts is not None
            or (self._drafts is not None and self._drafts.has_drafts)
            or self._transfers is not None
        )

    def _take_rows(
        self,
        step: StepInFlight,
        output: ModelRunnerOutput,
        verified: VerifiedDrafts | None,
        now: float,
        make_stats: Callable[[], SchedulerStats] | None,
    ) -> dict[int, EngineCoreOutputs]:
        token_ids = int32_view(output.sampled_token_ids)
        if self._transfers is not None:
            self._transfers.apply_report(step, output.kv_connector_output, now)
        if output.failed_slots:
            owners = self._owners(step)
            failed = {owners[slot]: why for slot, why in output.failed_slots if slot in owners}
            self._lifecycle.fail_requests(failed)
        sampling, num_drafts = step.sampling, step.num_drafts
        counts = num_verified = None
        if verified is not None:
            counts, num_verified = verified
        late: list[LateRow] = []
        if self._lifecycle.in_flight.preempted:
            late = self._find_late(step, token_ids, counts)
        if sampling.num_vacated != self._slots.num_vacated:
            alive = sampling.is_alive(self._slots)
            if not are_all(alive):
                sampling = sampling.select(alive)
                if counts is None or num_drafts is None or num_verified is None:
                    token_ids = token_ids[alive]
                else:
                    token_ids = token_ids[np.repeat(alive, counts)]
                    counts, num_drafts = counts[alive], num_drafts[alive]
                    num_verified = num_verified[alive]
        cut: dict[int, int] = {}
        if counts is not None and isinstance(self._passes, BlockPasses):
            self._passes.apply_counts(sampling.slots, counts)
            got = counts > 0
            sampling, counts = sampling.select(got), counts[got]
            sampled = cut_after_stops(self._running, sampling, token_ids, counts)
            token_ids, counts, cut = cut_at_limits(self._running, sampling, sampled)
            requests = {*map(self._running.__getitem__, sampling.slots.tolist())}
            requests.update(row.request for row in late)
            prefilled = self._passes.take_prefilled(step.prefilled, requests)
            step = msgspec.structs.replace(step, prefilled=prefilled)
        elif counts is not None and num_drafts is not None and num_verified is not None:
            if self._lifecycle.stats.spec_decoding is None:
                self._lifecycle.stats.spec_decoding = SpecDecodingStats()
            stats = self._lifecycle.stats.spec_decoding
            subtract_rejections(self._running, sampling, counts, num_drafts, num_verified, stats)
            if self._drafts is not None:
                self._drafts.limits.record_drafts(sampling.slots, counts - 1, num_verified)
            self._clients.record_drafts(sampling, num_verified)
            sampled = cut_after_stops(self._running, sampling, token_ids, counts)
            token_ids, counts, cut = sampled
        for row in late:
            cut[int(step.sampling.slots[row.position])] = len(row.token_ids) // 4
        if (
            output.logprobs
            or output.prompt_logprobs
            or output.pooled
            or output.nan_slots
            or output.prediction_counts
        ):
            self._take_row_reports(step, output, cut)
        if len(token_ids):
            self._take_tokens(step, sampling, token_ids, counts, now)
        rows, frame, rows_counts = sampling, token_ids.tobytes(), counts
        if late:
            num_late = self._take_late(step, late, now)
            if not len(token_ids):
                self._lifecycle.step_tokens.append(0)
            self._lifecycle.step_tokens[-1] += num_late
            rows = sampling.join(step.sampling.select(as_array([row.position for row in late])))
            frame += b"".join(row.token_ids for row in late)
            if rows_counts is not None:
                late_counts = [len(row.token_ids) // 4 for row in late]
                rows_counts = np.concatenate((rows_counts, np.array(late_counts, np.int64)))
        self._lifecycle.requeue_preempted(step.step)
        if self._drafts is not None:
            self._drafts.drop_drafts(sampling.slots)
            if output.drafts is not None:
                self._drafts.store_drafts(step.batch, output.drafts)
            if self._lifecycle.in_flight.preempted:
                self._lifecycle.in_flight.store_drafts(step.sampling, output.drafts)
            self._drafts.draft_forced_tokens(step)
        return self._clients.make_step_outputs(rows, frame, rows_counts, now, make_stats)

    def _owners(self, step: StepInFlight) -> dict[int, Request]:
        """Return, by slot, the requests of a step that still need its output."""
        owners = step.batch.get_live_requests(self._slots)
        for position, request in self._lifecycle.in_flight.find_preempted_rows(step.batch):
            owners[int(step.batch.slots[position])] = request
        return owners

    def _take_late(self, step: StepInFlight, late: list[LateRow], now: float) -> int:
        """Append the tokens of requests that were preempted while a step was in flight.

        Return the number of these tokens, plus the number of prompt tokens of requests that got their first token.
        """
        num_tokens = sum(len(row.token_ids) // 4 for row in late)
        requests = [row.request for row in late]
        for row in late:
            self._lifecycle.append_late_tokens(row.request, row.token_ids)
        prefilled = [row.request for row in step.prefilled if row.request in requests]
        num_tokens += self._take_first_tokens(prefilled, now)
        ends = [row.end for row in late if row.end is not None]
        for row in late:
            if row.request.params.structured_output is None:
                continue
            token_ids = int32_view(row.token_ids).tolist()
            if problem := self._advance_grammar(row.request, token_ids):
                ends = [end for end in ends if end[0] is not row.request]
                ends.append((row.request, _ERROR, None, problem))
        self._lifecycle.finish_requests(ends)
        return num_tokens

    def _find_late(
        self, step: StepInFlight, token_ids: Int32Array, counts: Int64Array | None
    ) -> list[LateRow]:
        """Return the rows that sampled for preempted requests, each with its tokens up to a stop."""
        late: list[LateRow] = []
        for position, request in self._lifecycle.in_flight.find_preempted_rows(step.sampling):
            if request.is_finished:
                continue
            start, count = position, 1
            if counts is not None:
                start, count = int(counts[:position].sum()), int(counts[position])
                if not count:
                    continue
            num_output = request.num_tokens - request.num_prompt_tokens
            most = self._lifecycle.max_output_tokens(request)
            end: End | None = None
            num_kept = 0
            for num_kept, token_id in enumerate(token_ids[start : start + count].tolist(), 1):
                is_full = num_output + num_kept >= most
                end = _find_end(request, token_id, num_output + num_kept, is_full)
                if end is not None:
                    break
            kept = token_ids[start : start + num_kept].tobytes()
            late.append(LateRow(request, position, kept, end))
        return late

    def apply_drafts(self, drafts: DraftTokenIds) -> None:
        """Apply drafts that arrive after the output of their step; ignore them if a later output came first."""
        step, batch = self._last_batch
        if self._drafts is not None and batch is not None and step == drafts.step:
            self._drafts.store_late_drafts(batch, drafts)

    def _pop(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput
    ) -> tuple[StepInFlight, VerifiedDrafts | None]:
        """Remove and return the step that an output belongs to, and what became of its drafts if it had any.

        Raises:
            EngineError: The output belongs to another step, or its arrays have the wrong shape.
        """
        step = self._in_flight[0] if self._in_flight else None
        if step is None or not step.step == output.step == scheduler_output.step:
            raise EngineError(
                f"output of step {output.step} for step {scheduler_output.step}, "
                f"expected step {step.step if step else 'none'}"
            )
        num_tokens = len(output.sampled_token_ids) // 4
        verified = None
        if step.num_drafts is not None:
            verified = counts, _ = VerifiedDrafts.from_output(output, step.num_drafts)
            least = self._passes.min_new_tokens
            if not verified.is_valid(len(step.num_drafts), num_tokens, least):
                raise EngineError(
                    f"step {step.step} returned {counted(num_tokens, 'token')}, {counts.tolist()} for rows "
                    f"with {step.num_drafts.tolist()} drafts"
                )
        elif num_tokens != len(step.sampling.slots):
            raise EngineError(
                f"step {step.step} returned {counted(num_tokens, 'token')} for {counted(len(step.sampling), 'row')}"
            )
        return self._in_flight.popleft(), verified

    def _take_row_reports(
        self, step: StepInFlight, output: ModelRunnerOutput, cut: dict[int, int]
    ) -> None:
        owners = self._owners(step)
        for slot in int32_view(output.nan_slots).tolist():
            if (request := owners.get(slot)) is None:
                continue
            if not request.is_corrupted:
                request.is_corrupted = True
                self._lifecycle.stats.num_corrupted_requests += 1
            if not request.has_untrusted_blocks:
                self._lifecycle.invalidate_blocks(request)
        for row in output.logprobs:
            if (request := owners.get(row.slot)) is not None:
                outbox = self._clients[request.client_index]
                num_kept = cut.get(row.slot, row.num_positions)
                outbox.logprobs.append(_token_logprobs(request, _first_positions(row, num_kept)))
        for row in output.prompt_logprobs:
            if (request := owners.get(row.slot)) is not None and not request.has_sampled:
                request.prompt_logprobs = request.prompt_logprobs or []
                request.prompt_logprobs.append(_token_logprobs(request, row))
        for vector in output.pooled:
            if (request := owners.get(vector.slot)) is not None:
                outbox = self._clients[request.client_index]
                index = request.request_index
                outbox.pooled.append(PooledVector(index, vector.vector, vector.first))
        predictions = int32_view(output.prediction_counts).reshape(-1, 3).tolist()
        for slot, num_accepted, num_rejected in predictions:
            if (request := owners.get(slot)) is not None:
                outbox = self._clients[request.client_index]
                num_kept = min(num_accepted, cut.get(slot, num_accepted))
                outbox.prediction_counts.append((request.request_index, num_kept, num_rejected))

    def _take_tokens(
        self,
        step: StepInFlight,
        sampling: Batch,
        token_ids: Int32Array,
        counts: Int64Array | None,
        now: float,
    ) -> None:
        num_tokens = len(token_ids)
        if counts is None:
            may_end = self._slots.append_output(sampling.slots, token_ids)
        else:
            may_end = self._slots.append_outputs(sampling.slots, counts, token_ids)
            token_ids = token_ids[np.cumsum(counts) - 1]
        if step.prefilled:
            prefilled = [row.request for row in step.prefilled if row.is_alive]
            num_prompt_tokens = self._take_first_tokens(prefilled, now)
            self._lifecycle.stats.num_prompt_tokens += num_prompt_tokens
            # A warm-up request has one output token, which is not counted.
            num_tokens += num_prompt_tokens - sum(request.is_warm_up for request in prefilled)
        self._lifecycle.step_tokens.append(num_tokens)
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
            # A grammar that failed allows only the end-of-sequence token, which does not end the text correctly.
            ends = [end for end in ends if end[0] not in refused]
            ends += [(request, _ERROR, None, message) for request, message in refused.items()]
        if ends:
            self._lifecycle.finish_requests(ends)

    def _take_first_tokens(self, prefilled: list[Request], now: float) -> int:
        """Record which requests got their first token since their admission.

        Return the number of prompt tokens of the requests that got their first token overall, without those of warm-up
        requests.
        """
        num_prompt_tokens = 0
        poison_isolation = self._lifecycle.poison_isolation
        if poison_isolation.suspects:
            for request in prefilled:
                poison_isolation.clear_suspect(request)
        requests = [request for request in prefilled if not request.has_sampled]
        self._clients.record_events(requests, _FIRST_TOKEN, now)
        for request in requests:
            request.has_sampled = True
            if not request.is_warm_up:
                num_prompt_tokens += request.num_prompt_tokens
            if request.prompt_logprobs:
                self._clients[request.client_index].prompt_logprobs += request.prompt_logprobs
                request.prompt_logprobs = None
        return num_prompt_tokens

    def _find_stops(self, rows: Iterable[tuple[int, int, int, bool]]) -> list[End]:
        """Return the requests that finish.

        Each row is (slot, last token, number of output tokens, whether the limit of output tokens is reached).
        """
        requests = self._slots.requests
        ends: list[End] = []
        for slot, token_id, num_output, is_full in rows:
            request = requests[slot]
            assert request is not None
            if end := _find_end(request, token_id, num_output, is_full):
                ends.append(end)
        return ends

    def _advance_grammars(
        self, rows: Iterable[ScheduledRow], num_new: dict[int, int]
    ) -> dict[Request, str]:
        """Advance the grammars of constrained requests by their new tokens.

        Return an error message for each request whose grammar refuses them.
        """
        refused: dict[Request, str] = {}
        for row in rows:
            request = row.request
            if not row.is_alive:
                continue
            token_ids = self._slots.output_token_ids(request.slot)[
                -num_new[request.slot] :
            ].tolist()
            if problem := self._advance_grammar(request, token_ids):
                refused[request] = problem
        return refused

    def _advance_grammar(self, request: Request, token_ids: list[int]) -> str:
        """Advance the grammar of a request. Return an error message if it refuses the tokens, else ""."""
        grammars = self._lifecycle.grammars
        request.awaits_mask = grammars.is_isolated(request)
        if grammars.accept(request, token_ids):
            return ""
        problem = grammars.find_error(request) or "it forbids them"
        return f"the grammar cannot go on after token {', '.join(map(str, token_ids))}: {problem}"


def _find_end(request: Request, token_id: int, num_output: int, is_full: bool) -> End | None:
    """Return how a request finishes if this token is its last."""
    if request.stops_at(token_id, num_output):
        return request, _STOP, None if token_id in request.eos_token_ids else token_id, ""
    return (request, _LENGTH, None, "") if is_full else None


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
