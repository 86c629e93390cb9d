"""Which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase: a request has computed tokens and expected tokens, and
each step gives it tokens until the first catch up with the second. Running requests are handled
together, in array operations; single ones are visited only when something happens to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from ..protocol.arrays import BoolArray, Int32Array, Int64Array, int32_bytes, int32_view
from ..protocol.config import CacheConfig, SchedulerConfig
from ..protocol.errors import ConfigError, EngineError
from ..protocol.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EventKind,
    FinishedRequest,
    FinishReason,
    ModelRunnerOutput,
    NewRequestData,
    RowLogprobs,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from .batch import Batch, StepInFlight, Tenure
from .client_outputs import ClientOutputs
from .grammars import GrammarBackend, Grammars
from .interface import SchedulerInterface
from .kv_cache_manager import KVCacheManager
from .request import Request, RequestKey, RequestStatus
from .request_queue import FCFSQueue
from .requirements import Requirements
from .running_requests import RunningRequests
from .slots import SlotArray, Slots


class _Rows(NamedTuple):
    """Running rows of a step in the making: the tokens granted to each, and whether it samples."""

    slots: SlotArray
    granted: Int64Array
    samples: BoolArray
    block_updates: bytes
    num_tokens: int


class _Admissions(NamedTuple):
    """Rows that enter a step in the making."""

    requests: list[NewRequestData]
    granted: list[int]
    samples: list[bool]


class Scheduler(SchedulerInterface):
    """First come, first served, over one KV cache of `num_blocks` blocks.

    Raises ConfigError for limits that contradict each other.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        *,
        max_model_len: int,
        vocab_size: int,
        num_blocks: int,
        core_index: int = 0,
        structured_output: GrammarBackend | None = None,
    ) -> None:
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} is below "
                f"max_model_len={max_model_len}, which only chunked prefill allows"
            )
        if num_blocks < 2:
            raise ConfigError(f"the KV cache has {num_blocks} blocks and needs at least 2")
        self._config = config
        self._grammars = Grammars(structured_output, vocab_size)
        self.kv_cache_manager = KVCacheManager(
            num_blocks=num_blocks,
            block_size=cache_config.block_size,
            max_num_seqs=config.max_num_seqs,
            enable_prefix_caching=cache_config.enable_prefix_caching,
        )
        self._requirements = Requirements(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            block_size=cache_config.block_size,
            num_blocks=num_blocks - 1,
            has_grammars=structured_output is not None,
            max_num_queued_reqs=config.max_num_queued_reqs,
            max_num_queued_tokens=config.max_num_queued_tokens,
        )
        # The last token of a request is never computed, so it needs no place in the cache.
        self._max_total_tokens = min(max_model_len, self.kv_cache_manager.max_tokens + 1)
        self.slots = Slots(config.max_num_seqs, vocab_size)
        self._running = RunningRequests(self.slots, config.max_num_seqs)
        self.requests: dict[RequestKey, Request] = {}
        self._queue = FCFSQueue()
        self._num_arrivals = 0
        self._num_queued_tokens = 0
        self._blocked: tuple[Request, int] | None = None
        self._step = 0
        self._in_flight: deque[StepInFlight] = deque()
        self._last_batch = Batch(self._running.order, self.slots)
        self._clients = ClientOutputs(core_index)
        self._stats = SchedulerStats()

    # what comes from outside

    def add_client(self, client_index: int) -> None:
        self._clients.open(client_index)

    def finish_client(self, client_index: int) -> None:
        keys = [key for key in self.requests if key[0] == client_index]
        self.finish_requests(keys, FinishReason.ABORT)
        self._clients.close(client_index)

    def add_request(self, client_index: int, message: EngineCoreRequest, now: float) -> None:
        self._clients.open(client_index)
        if (client_index, message.request_index) in self.requests:
            return
        refusal = self._requirements.refuse(
            message,
            num_queued_reqs=len(self.requests) - len(self._running),
            num_queued_tokens=self._num_queued_tokens,
        )
        if refusal is not None:
            finished = FinishedRequest(
                message.request_index, refusal.reason, message=refusal.message
            )
            self._clients.finish(client_index, finished)
            return
        request = Request(client_index, message, self._num_arrivals)
        self._num_arrivals += 1
        self._num_queued_tokens += request.num_tokens
        self.requests[request.key] = request
        self._clients.event(request, EventKind.QUEUED, now)
        if self._grammars.start(request):
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
        else:
            self._queue.add(request)

    def grammar_ready(self, key: RequestKey, error: str | None) -> None:
        request = self.requests.get(key)
        if request is None or request.status is not RequestStatus.WAITING_FOR_GRAMMAR:
            return
        if error is not None:
            self._finish(request, FinishReason.ERROR, message=error)
        else:
            request.status = RequestStatus.WAITING
            self._queue.restore(request)

    def finish_requests(
        self, keys: Iterable[RequestKey], reason: FinishReason, message: str = ""
    ) -> None:
        for key in keys:
            request = self.requests.get(key)
            if request is not None:
                self._finish(request, reason, message=message)

    def reset_prefix_cache(self, reset_running_requests: bool = False, now: float = 0.0) -> bool:
        if reset_running_requests:
            for slot in self._running.order.tolist():
                self._preempt(slot, now)
        return self.kv_cache_manager.reset_prefix_cache()

    # the next step

    def schedule(self, now: float) -> SchedulerOutput | None:
        may_admit = not self._inject_preemption(now)
        while (rows := self._schedule_running()) is None:
            self._preempt(int(self._running.order[-1]), now)
            may_admit = False
        self._advance_prefills()
        budget = self._config.max_num_batched_tokens - rows.num_tokens
        admitted = self._admit(budget if may_admit else 0, now)
        if not (rows.num_tokens or admitted.requests or self._running.has_removed):
            return None
        return self._make_step(rows, admitted)

    def _schedule_running(self) -> _Rows | None:
        """Grant tokens and blocks to the running requests; None, and nothing done, if blocks are lacking."""
        manager = self.kv_cache_manager
        state = self.slots
        slots = self._running.order
        computed = state.num_computed_tokens[slots]
        expected = state.num_expected_tokens[slots]
        wanted = np.minimum(expected, state.max_computed_tokens[slots])
        wanted -= computed
        granted = self._limit(wanted)
        num_tokens = int(granted.sum())
        samples = granted > 0
        if granted is not wanted:
            samples &= granted == wanted
        computed += granted
        growth = manager.plan_growth(slots, computed)
        if growth.total > manager.pool.num_free:
            return None
        updates = manager.grow(growth).tobytes() if growth.total else b""
        expected += samples
        state.num_computed_tokens[slots] = computed
        state.num_expected_tokens[slots] = expected
        return _Rows(slots, granted, samples, updates, num_tokens)

    def _limit(self, wanted: Int64Array) -> Int64Array:
        """Cut what the running requests want to the limits of a step, first come first served."""
        threshold = self._config.long_prefill_token_threshold
        if threshold and self._running.prefilling:
            wanted = np.minimum(wanted, threshold)
        budget = self._config.max_num_batched_tokens
        if wanted.sum() > budget:
            before = np.cumsum(wanted) - wanted
            wanted = np.clip(budget - before, 0, wanted)
        return wanted

    def _advance_prefills(self) -> None:
        """Make findable what this step fills of prompts, and note whose prefill it completes."""
        for slot, num_prefill_tokens in list(self._running.prefilling.items()):
            num_computed = int(self.slots.num_computed_tokens[slot])
            self.kv_cache_manager.cache_blocks(self._running[slot], num_computed)
            if num_computed >= num_prefill_tokens:
                self._running.complete_prefill(slot)

    def _admit(self, budget: int, now: float) -> _Admissions:
        """Admit waiting requests while tokens, slots and blocks last."""
        manager = self.kv_cache_manager
        admitted = _Admissions([], [], [])
        while budget > 0 and self.slots.num_free:
            request = self._queue.peek()
            if request is None or self._blocked == (request, manager.pool.num_openings):
                break
            blocks = manager.find_computed_blocks(request)
            num_computed = len(blocks) * manager.block_size
            wanted = request.num_tokens - num_computed
            granted = min(wanted, budget)
            if self._config.enable_chunked_prefill:
                granted = min(granted, self._config.long_prefill_token_threshold or granted)
            elif granted < wanted:
                break
            if not manager.can_admit(blocks, num_computed + granted):
                self._blocked = request, manager.pool.num_openings
                break
            self._queue.pop()
            admitted.requests.append(self._start(request, blocks, granted, now))
            admitted.granted.append(granted)
            admitted.samples.append(granted == wanted)
            budget -= granted
        return admitted

    def _start(
        self, request: Request, computed_blocks: list[int], granted: int, now: float
    ) -> NewRequestData:
        """Give a waiting request a slot, its blocks and its first tokens to compute."""
        manager = self.kv_cache_manager
        num_tokens = request.num_tokens
        num_cached = len(computed_blocks) * manager.block_size
        num_computed = num_cached + granted
        token_ids = request.token_ids
        self._num_queued_tokens -= num_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached
            if manager.reads_cache_for(request):
                self._stats.prefix_cache_queries += num_tokens
                self._stats.prefix_cache_hits += num_cached
        max_output = self._max_total_tokens - request.num_prompt_tokens
        if request.params.max_tokens is not None:
            max_output = min(max_output, request.params.max_tokens)
        slot = self._running.append(
            request, num_computed_tokens=num_computed, max_output_tokens=max_output
        )
        block_ids = manager.admit(slot, computed_blocks, num_computed)
        manager.cache_blocks(request, num_computed)
        request.status = RequestStatus.RUNNING
        self._clients.event(request, EventKind.SCHEDULED, now)
        return NewRequestData(
            slot=slot,
            request_id=request.key,
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=num_cached,
            block_ids=(int32_bytes(block_ids),),
            sampling_params=request.params,
            eos_token_ids=request.eos_token_ids,
        )

    def _make_step(self, rows: _Rows, admitted: _Admissions) -> SchedulerOutput:
        """Write down what was decided: for the workers, and for the output to come."""
        slots, granted, samples = rows.slots, rows.granted, rows.samples
        if not granted.all():
            positions = granted.nonzero()[0]
            slots, granted, samples = slots[positions], granted[positions], samples[positions]
        if admitted.requests:
            new_slots = np.array([request.slot for request in admitted.requests], np.intp)
            slots = np.concatenate((slots, new_slots))
            granted = np.concatenate((granted, np.array(admitted.granted, np.int64)))
            samples = np.concatenate((samples, np.array(admitted.samples, np.bool_)))
        last = self._last_batch
        is_same = np.array_equal(slots, last.slots)
        if not is_same or last.num_vacated != self.slots.num_vacated:
            self._last_batch = Batch(slots.copy(), self.slots)
        batch = self._last_batch
        sampling = batch if samples.all() else batch.select(samples)
        constrained = self._constrained_rows(sampling)
        self._step += 1
        prefilled = self._running.take_completed_prefills()
        self._in_flight.append(StepInFlight(self._step, batch, sampling, prefilled, constrained))
        self._stats.num_steps += 1
        self._stats.num_scheduled_tokens += rows.num_tokens + sum(admitted.granted)
        chunked = (granted != 1).nonzero()[0]
        removed = self._running.take_removed()
        return SchedulerOutput(
            step=self._step,
            removed_slots=int32_bytes(removed) if removed else b"",
            new_requests=admitted.requests,
            block_updates=rows.block_updates,
            slots=None if is_same else batch.slot_bytes,
            chunks=int32_bytes(np.stack((chunked, granted[chunked]), 1)) if len(chunked) else b"",
            grammar_slots=int32_bytes([row.slot for row in constrained]) if constrained else b"",
        )

    def _constrained_rows(self, sampling: Batch) -> list[Tenure]:
        if not self._running.num_constrained:
            return []
        rows = map(self._running.tenure, sampling.slots.tolist())
        return [row for row in rows if row.request.params.structured_output is not None]

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> bytes:
        step = next(step for step in self._in_flight if step.step == scheduler_output.step)
        return self._grammars.bitmask(step.constrained, self.slots)

    # the output of a step

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        now: float,
    ) -> dict[int, EngineCoreOutputs]:
        step = self._next_in_flight(scheduler_output, model_runner_output)
        token_ids = int32_view(model_runner_output.sampled_token_ids)
        if len(token_ids) != len(step.sampling):
            raise EngineError(
                f"step {step.step} returned {len(token_ids)} tokens for {len(step.sampling)} rows"
            )
        self._in_flight.popleft()
        if model_runner_output.failed_slots:
            self._fail_rows(step, model_runner_output.failed_slots)
        if (
            model_runner_output.logprobs
            or model_runner_output.prompt_logprobs
            or model_runner_output.nan_slots
        ):
            self._take_row_reports(step, model_runner_output)
        sampling = step.sampling
        if sampling.num_vacated != self.slots.num_vacated:
            alive = sampling.alive(self.slots)
            if not alive.all():
                sampling, token_ids = sampling.select(alive), token_ids[alive]
        if len(token_ids):
            self._take_tokens(step, sampling, token_ids, now)
        return self._clients.take(sampling, token_ids, now, self.make_stats)

    def _next_in_flight(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput
    ) -> StepInFlight:
        step = self._in_flight[0] if self._in_flight else None
        if step is None or not step.step == scheduler_output.step == output.step:
            raise EngineError(
                f"output of step {output.step} for step {scheduler_output.step}, "
                f"expected step {step.step if step else 'none'}"
            )
        return step

    def _take_tokens(
        self, step: StepInFlight, sampling: Batch, token_ids: Int32Array, now: float
    ) -> None:
        may_end = self.slots.append_output(sampling.slots, token_ids)
        for row in step.prefilled:
            if row.is_alive(self.slots) and not row.request.has_sampled:
                self._take_first_token(row.request, now)
        for position in may_end.tolist():
            slot = int(sampling.slots[position])
            self._check_stop(self._running[slot], int(token_ids[position]))
        for row in step.constrained:
            if row.is_alive(self.slots):
                self._advance_grammar(row.request)

    def _take_first_token(self, request: Request, now: float) -> None:
        request.has_sampled = True
        self._clients.event(request, EventKind.FIRST_TOKEN, now)
        self._clients[request.client_index].prompt_logprobs += request.prompt_logprobs
        request.prompt_logprobs = []

    def _check_stop(self, request: Request, token_id: int) -> None:
        num_output = int(self.slots.num_output_tokens[request.slot])
        if token_id in request.stop_token_ids and num_output >= request.params.min_tokens:
            is_eos = token_id in request.eos_token_ids
            self._finish(request, FinishReason.STOP, stop_reason=None if is_eos else token_id)
        elif num_output >= self.slots.max_output_tokens[request.slot]:
            self._finish(request, FinishReason.LENGTH)

    def _advance_grammar(self, request: Request) -> None:
        token_ids = self.slots.output_token_ids(request.slot)[-1:].tolist()
        if not self._grammars.accept(request, token_ids):
            self._finish(
                request,
                FinishReason.ERROR,
                message=f"token {token_ids[0]} was generated against the grammar",
            )

    def _fail_rows(self, step: StepInFlight, failed_slots: list[tuple[int, str]]) -> None:
        owners = step.batch.owners(self.slots)
        for slot, message in failed_slots:
            request = owners.get(slot)
            if request is not None and request.status is RequestStatus.RUNNING:
                self.kv_cache_manager.distrust(request)
                self._finish(request, FinishReason.ERROR, message=message)

    def _take_row_reports(self, step: StepInFlight, output: ModelRunnerOutput) -> None:
        """Take in what a step says of single rows, but for those whose request has left."""
        owners = step.batch.owners(self.slots)
        for slot in int32_view(output.nan_slots).tolist():
            if (request := owners.get(slot)) is not None and not request.is_corrupted:
                request.is_corrupted = True
                self._stats.num_corrupted_requests += 1
        for row in output.logprobs:
            if (request := owners.get(row.slot)) is not None:
                outbox = self._clients[request.client_index]
                outbox.logprobs.append(_token_logprobs(request, row))
        for row in output.prompt_logprobs:
            if (request := owners.get(row.slot)) is not None and not request.has_sampled:
                request.prompt_logprobs.append(_token_logprobs(request, row))

    def take_outputs(self, now: float) -> dict[int, EngineCoreOutputs]:
        return self._clients.take_urgent(now)

    # questions

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def has_finished_requests(self) -> bool:
        return self._running.has_removed

    def get_request_counts(self) -> tuple[int, int]:
        return len(self._running), len(self.requests) - len(self._running)

    def make_stats(self) -> SchedulerStats:
        stats, self._stats = self._stats, SchedulerStats()
        stats.num_running, stats.num_waiting = self.get_request_counts()
        stats.kv_cache_usage = self.kv_cache_manager.pool.usage
        return stats

    # leaving a slot

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: int | None = None,
        message: str = "",
    ) -> None:
        del self.requests[request.key]
        if request.status is RequestStatus.RUNNING:
            self._vacate(request)
        else:
            self._num_queued_tokens -= request.num_tokens
        self._grammars.release(request)
        request.status = RequestStatus.finished(reason)
        finished = FinishedRequest(request.request_index, reason, stop_reason, message)
        self._clients.finish(request.client_index, finished)

    def _preempt(self, slot: int, now: float) -> None:
        """Take everything from a running request but its tokens, and let it wait in its old place."""
        request = self._running[slot]
        request.output_token_ids = self.slots.output_token_ids(slot).tobytes()
        self._vacate(request)
        request.status = RequestStatus.PREEMPTED
        request.prompt_logprobs = []
        self._num_queued_tokens += request.num_tokens
        self._queue.restore(request)
        self._stats.num_preemptions += 1
        self._clients.event(request, EventKind.PREEMPTED, now)

    def _vacate(self, request: Request) -> None:
        slot = request.slot
        output = self.slots.output_token_ids(slot)
        num_known = request.num_prompt_tokens + len(output)
        num_certain = min(int(self.slots.num_computed_tokens[slot]), num_known)
        self.kv_cache_manager.free(request, num_certain, output)
        self._running.remove(request)

    def _inject_preemption(self, now: float) -> bool:
        """Preempt a running request with the configured probability, by a hash of the step's number."""
        probability = self._config.inject_preemption
        if not probability:
            return False
        slots = self._running.order
        draw = blake2b(self._step.to_bytes(8, "little"), digest_size=8).digest()
        chance = int.from_bytes(draw[:4], "little") / 2**32
        if not len(slots) or chance >= probability:
            return False
        self._preempt(int(slots[int.from_bytes(draw[4:], "little") % len(slots)]), now)
        return True


def _token_logprobs(request: Request, row: RowLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        request.request_index, row.num_positions, row.token_ids, row.logprobs, row.ranks
    )
