"""Which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase: a request has computed tokens and expected tokens, and
each step gives it tokens until the first catch up with the second. Running requests are handled
together, in array operations; single ones are visited only when something happens to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np

from ..protocol.arrays import BoolArray, Int64Array, int32_bytes
from ..protocol.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from ..protocol.errors import ConfigError
from ..protocol.kv_cache_groups import FULL_ATTENTION, KVCacheGroup, max_request_tokens
from ..protocol.kv_events import KVCacheEvent
from ..protocol.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
)
from .admission_delay import AdmissionDelay
from .batch import Batch, StepInFlight, Tenure
from .client_outputs import ClientOutputs
from .conservation import find_violations
from .fair_queue import FairQueue
from .grammars import GrammarBackend, Grammars
from .interface import SchedulerInterface
from .kv_cache_manager import Growth, KVCacheManager
from .kv_event_log import KVEventLog
from .partial_prefills import PartialPrefills
from .request import Request, RequestKey
from .request_lifecycle import RequestLifecycle
from .request_queue import DeadlineQueue, FCFSQueue, PriorityQueue, RequestQueue
from .requirements import Requirements
from .running_requests import RunningRequests
from .slots import SlotArray, Slots
from .step_results import StepResults

CONSERVATION_INTERVAL: Final = 1000
"""Steps between two counts of what must add up."""


class _RunningPlan(NamedTuple):
    """What the running requests would compute: `granted` of the `wanted` tokens each, up to `computed`.

    `share` is the most that a prompt gets in the step, unless more of it would finish the prompt.
    """

    slots: SlotArray
    wanted: Int64Array
    granted: Int64Array
    computed: Int64Array
    growth: Growth
    num_tokens: int
    share: int


class _Admissions(NamedTuple):
    """Rows that enter a step in the making."""

    requests: list[NewRequestData]
    granted: list[int]
    samples: list[bool]


class Scheduler(SchedulerInterface):
    """One replica's scheduler over a KV cache of `num_blocks` blocks, which the `kv_cache_groups` share.

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
        num_host_blocks: int = 0,
        kv_cache_groups: tuple[KVCacheGroup, ...] = FULL_ATTENTION,
        core_index: int = 0,
        structured_output: GrammarBackend | None = None,
        log_kv_events: bool = False,
    ) -> None:
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} is below "
                f"max_model_len={max_model_len}, which only chunked prefill allows"
            )
        if num_blocks < 2:
            raise ConfigError(f"the KV cache has {num_blocks} blocks and needs at least 2")
        self._config = config
        self._partial_prefills = PartialPrefills(config, cache_config, max_model_len)
        self._delay = AdmissionDelay(config.scheduler_delay_factor)
        self.slots = Slots(config.max_num_seqs, vocab_size)
        self._kv_events = KVEventLog(cache_config.block_size) if log_kv_events else None
        self.kv_cache_manager = KVCacheManager(
            num_blocks=num_blocks,
            block_size=cache_config.block_size,
            slots=self.slots,
            enable_prefix_caching=cache_config.enable_prefix_caching,
            groups=kv_cache_groups,
            num_host_blocks=num_host_blocks,
            preemption_mode=config.preemption_mode,
            events=self._kv_events,
        )
        self._running = RunningRequests(self.slots, config.max_num_seqs)
        self._queue = _make_queue(config, self._running)
        self._grammars = Grammars(structured_output, vocab_size)
        self._clients = ClientOutputs(core_index)
        self._lifecycle = RequestLifecycle(
            requirements=Requirements(
                vocab_size=vocab_size,
                max_model_len=max_model_len,
                block_size=cache_config.block_size,
                num_blocks=num_blocks - 1,
                has_grammars=structured_output is not None,
                max_num_queued_reqs=config.max_num_queued_reqs,
                max_num_queued_tokens=config.max_num_queued_tokens,
                max_computed_tokens=max_request_tokens(
                    kv_cache_groups,
                    num_blocks - 1,
                    config.max_num_batched_tokens,
                    cache_config.block_size,
                    max_model_len,
                ),
            ),
            manager=self.kv_cache_manager,
            running=self._running,
            queue=self._queue,
            clients=self._clients,
            grammars=self._grammars,
        )
        self.requests = self._lifecycle.requests
        self._results = StepResults(self._lifecycle)
        self._blocked: tuple[Request, int] | None = None
        self._num_common_blocks = 0
        self._last_batch = Batch(self._running.order, self.slots)
        self._step = 0
        self.violations: list[str] = []
        """What did not add up, since the owner of the scheduler last emptied this."""

    # what comes from outside

    def add_client(self, client_index: int) -> None:
        self._clients.open(client_index)

    def finish_client(self, client_index: int) -> None:
        keys = [key for key in self.requests if key[0] == client_index]
        self.finish_requests(keys, FinishReason.ABORT)
        self._clients.close(client_index)

    def add_request(self, client_index: int, message: EngineCoreRequest, now: float) -> None:
        request = self._lifecycle.add(client_index, message, now)
        if request is not None:
            self._delay.arrived(request)

    def grammar_ready(self, key: RequestKey, error: str | None) -> None:
        self._lifecycle.grammar_ready(key, error)

    def finish_requests(
        self, keys: Iterable[RequestKey], reason: FinishReason, message: str = ""
    ) -> None:
        for key in keys:
            request = self.requests.get(key)
            if request is not None:
                self._lifecycle.finish(request, reason, message=message)

    def reset_prefix_cache(self, reset_running_requests: bool = False, now: float = 0.0) -> bool:
        if reset_running_requests:
            for slot in self._running.order.tolist():
                self._lifecycle.preempt(slot, now)
        return self.kv_cache_manager.reset_prefix_cache()

    # the next step

    def schedule(self, now: float) -> SchedulerOutput | None:
        self.kv_cache_manager.pool.lifetimes.now = now
        self._lifecycle.expire(now)
        may_admit = not self._inject_preemption(now)
        if self.kv_cache_manager.has_windows:
            self.kv_cache_manager.begin_step(self._running.order)
        plan = self._plan_running()
        while plan.growth.total > self.kv_cache_manager.pool.num_free:
            self._lifecycle.preempt(self._queue.victim(), now)
            may_admit = False
            plan = self._plan_running()
        max_admitted = self.slots.num_free if may_admit else 0
        if may_admit and self._queue:
            displaced = self._displace(plan, now)
            if displaced is not None:
                plan, max_admitted = displaced, 1
        samples = self._carry_out(plan)
        admitted = self._admit(plan, max_admitted, now)
        if not (plan.num_tokens or admitted.requests or self._running.has_removed):
            return None
        return self._make_step(plan, samples, admitted, now)

    def _plan_running(self, without: Sequence[int] = ()) -> _RunningPlan:
        """What the running requests may compute. The blocks for it may be lacking."""
        state = self.slots
        slots = self._running.order
        if without:
            slots = slots[np.isin(slots, without, invert=True)]
        computed = state.num_computed_tokens[slots]
        wanted = np.minimum(state.num_expected_tokens[slots], state.max_computed_tokens[slots])
        wanted -= computed
        granted, share = self._limit(slots, wanted)
        computed += granted
        growth = self.kv_cache_manager.plan_growth(slots, computed)
        return _RunningPlan(slots, wanted, granted, computed, growth, int(granted.sum()), share)

    def _limit(self, slots: SlotArray, wanted: Int64Array) -> tuple[Int64Array, int]:
        """Cut what the running requests want to the limits of a step, first come first served.

        Returns the tokens granted, and the share of each prompt.
        """
        limits = self._partial_prefills
        prefilling = self._running.prefilling
        if prefilling:
            is_prefill = np.isin(slots, list(prefilling))
            num_decodes = int(np.count_nonzero(wanted[~is_prefill]))
            share = limits.share(num_decodes, len(prefilling), len(self._queue))
            wanted = limits.cap_rows(wanted, is_prefill, share)
        else:
            share = limits.share(len(slots), 0, len(self._queue))
        budget = self._config.max_num_batched_tokens
        if wanted.sum() > budget:
            before = np.cumsum(wanted) - wanted
            wanted = np.clip(budget - before, 0, wanted)
        return wanted, share

    def _displace(self, plan: _RunningPlan, now: float) -> _RunningPlan | None:
        """Preempt requests that the first waiting one may displace, if that makes room for it.

        Returns the plan for those that remain; None, and nothing done, when it has room anyway or never.
        """
        request = self._queue.peek()
        if request is None or self._is_blocked(request):
            return None
        candidates = self._queue.displaceable(request)
        if not candidates or self._has_room(request, plan):
            return None
        if not self._has_room(request, self._plan_running(candidates), candidates):
            return None
        for slot in candidates:
            self._lifecycle.preempt(slot, now)
            plan = self._plan_running()
            if self._has_room(request, plan):
                break
        return plan

    def _has_room(self, request: Request, plan: _RunningPlan, without: Sequence[int] = ()) -> bool:
        """Whether a waiting request could be admitted beside the plan, were it not for some slots."""
        manager = self.kv_cache_manager
        budget = self._config.max_num_batched_tokens - plan.num_tokens
        if budget <= 0 or not (self.slots.num_free or without):
            return False
        found = manager.find_computed_blocks(request)
        num_cached = found.num_blocks * manager.block_size
        granted = self._first_chunk(request.num_tokens - num_cached, budget, plan.share)
        if not granted:
            return False
        lacking = manager.count_needed(found, num_cached + granted, without) + plan.growth.total
        return lacking <= manager.pool.num_free

    def _first_chunk(self, wanted: int, budget: int, share: int) -> int:
        """How many tokens a request may begin with; 0 if it must wait for a larger budget."""
        if self._config.enable_chunked_prefill:
            return min(self._partial_prefills.cap(wanted, share), budget)
        return wanted if wanted <= budget else 0

    def _is_blocked(self, request: Request) -> bool:
        """Whether the request was found not to fit, and no block has become free since."""
        if self._blocked is None:
            return False
        blocked, num_openings = self._blocked
        return blocked is request and num_openings == self.kv_cache_manager.pool.num_openings

    def _carry_out(self, plan: _RunningPlan) -> BoolArray:
        """Give the running requests what was planned. Returns which of them sample."""
        slots, state = plan.slots, self.slots
        samples: BoolArray = plan.granted > 0
        if plan.granted is not plan.wanted:
            samples &= plan.granted == plan.wanted
        state.num_computed_tokens[slots] = plan.computed
        state.num_expected_tokens[slots] += samples
        self.kv_cache_manager.grow(plan.growth)
        for slot, num_prefill_tokens in list(self._running.prefilling.items()):
            request = self._running[slot]
            num_computed = int(state.num_computed_tokens[slot])
            self.kv_cache_manager.cache_blocks(request, num_computed)
            if num_computed >= num_prefill_tokens:
                self._running.complete_prefill(request)
        return samples

    def _admit(self, plan: _RunningPlan, max_admitted: int, now: float) -> _Admissions:
        """Admit waiting requests while tokens, slots and blocks last."""
        queue, manager, limits = self._queue, self.kv_cache_manager, self._partial_prefills
        admitted = _Admissions([], [], [])
        budget = self._config.max_num_batched_tokens - plan.num_tokens
        if not (queue and max_admitted and budget > 0):
            return admitted
        partial = [self._running[slot].num_tokens for slot in self._running.prefilling]
        num_partial, num_long = len(partial), sum(map(limits.is_long, partial))
        if not limits.are_long_at_limit(num_long):
            queue.recall()
        while budget > 0 and len(admitted.requests) < max_admitted:
            request = queue.peek()
            if request is None or (self._blocked and self._is_blocked(request)):
                break
            if self._delay.factor and self._delay.holds_back(request, now) and len(self._running):
                break
            found = manager.find_computed_blocks(request)
            num_cached = found.num_blocks * manager.block_size
            wanted = request.num_tokens - num_cached
            granted = self._first_chunk(wanted, budget, plan.share)
            is_partial = granted < wanted
            is_long = is_partial and limits.is_long(request.num_tokens)
            if not granted or (is_partial and limits.are_at_limit(num_partial)):
                break
            if is_long and limits.are_long_at_limit(num_long):
                queue.set_aside()
                continue
            tables = manager.allocate(found, num_cached + granted)
            if tables is None:
                self._blocked = request, manager.pool.num_openings
                break
            num_partial += is_partial
            num_long += is_long
            data = self._lifecycle.start(request, tables, found, granted, now)
            admitted.requests.append(data)
            admitted.granted.append(granted)
            admitted.samples.append(not is_partial)
            budget -= granted
        return admitted

    def _make_step(
        self,
        plan: _RunningPlan,
        samples: BoolArray,
        admitted: _Admissions,
        now: float,
    ) -> SchedulerOutput:
        """Write down what was decided: for the workers, and for the output to come."""
        slots, granted = plan.slots, plan.granted
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
            self._num_common_blocks = self.kv_cache_manager.count_common_blocks(slots)
        batch = self._last_batch
        sampling = batch if samples.all() else batch.select(samples)
        constrained = self._constrained_rows(sampling)
        prefilled = self._running.take_completed_prefills()
        has_prefill = bool(prefilled or self._running.prefilling)
        self._step += 1
        self._results.expect(
            StepInFlight(self._step, batch, sampling, prefilled, constrained, now, has_prefill)
        )
        stats = self._lifecycle.stats
        stats.num_steps += 1
        stats.num_scheduled_tokens += plan.num_tokens + sum(admitted.granted)
        chunked = (granted != 1).nonzero()[0]
        removed = self._running.take_removed()
        host = self.kv_cache_manager.host
        copies_out, copies_in = host.take_copies() if host is not None else (b"", b"")
        return SchedulerOutput(
            step=self._step,
            removed_slots=int32_bytes(removed) if removed else b"",
            new_requests=admitted.requests,
            block_updates=self.kv_cache_manager.take_block_updates(),
            slots=None if is_same else batch.slot_bytes,
            chunks=int32_bytes(np.stack((chunked, granted[chunked]), 1)) if len(chunked) else b"",
            grammar_slots=int32_bytes([row.request.slot for row in constrained])
            if constrained
            else b"",
            host_copies_out=copies_out,
            host_copies_in=copies_in,
            num_common_blocks=self._num_common_blocks,
        )

    def _constrained_rows(self, sampling: Batch) -> list[Tenure]:
        if not self._running.num_constrained:
            return []
        requests = map(self._running.__getitem__, sampling.slots.tolist())
        return [
            Tenure(request, request.num_admissions)
            for request in requests
            if request.params.structured_output is not None
        ]

    def _inject_preemption(self, now: float) -> bool:
        """Preempt a running request with the configured probability, by a hash of the step's number."""
        probability = self._config.inject_preemption
        if not probability or not len(self._running):
            return False
        digest = blake2b(self._step.to_bytes(8, "little"), digest_size=8).digest()
        chance = int.from_bytes(digest[:4], "little") / 2**32
        if chance >= probability:
            return False
        draw = int.from_bytes(digest[4:], "little")
        slots = self._running.order
        self._lifecycle.preempt(int(slots[draw % len(slots)]), now)
        return True

    # the outputs of steps

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> bytes:
        return self._grammars.bitmask(self._results.expected(scheduler_output.step).constrained)

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        now: float,
    ) -> dict[int, EngineCoreOutputs]:
        if scheduler_output.step % CONSERVATION_INTERVAL == 0:
            violations = self.find_violations()
            self.violations += violations
            self._lifecycle.stats.num_violations += len(violations)
        step, outputs = self._results.take(scheduler_output, model_runner_output, now)
        if step.has_prefill:
            self._delay.prefilled(now - step.scheduled_at)
        return outputs

    def take_outputs(self, now: float) -> dict[int, EngineCoreOutputs]:
        return self._clients.take_urgent(now)

    def take_kv_events(self) -> list[KVCacheEvent]:
        return self._kv_events.take() if self._kv_events else []

    # questions

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def has_finished_requests(self) -> bool:
        return self._running.has_removed

    def get_request_counts(self) -> tuple[int, int]:
        return len(self._running), self._lifecycle.num_waiting

    def find_violations(self) -> list[str]:
        """Every conserved quantity that is not, in words."""
        return find_violations(self.requests, self._running, self._queue, self.kv_cache_manager)

    def make_stats(self) -> SchedulerStats:
        return self._lifecycle.make_stats()


def _make_queue(config: SchedulerConfig, running: RunningRequests) -> RequestQueue:
    match config.policy:
        case SchedulingPolicy.FCFS:
            return FCFSQueue(running)
        case SchedulingPolicy.PRIORITY:
            return PriorityQueue(running, preempts=config.priority_preemption)
        case SchedulingPolicy.DEADLINE:
            return DeadlineQueue(running)
        case SchedulingPolicy.FAIR:
            return FairQueue(
                running, max_num_seqs=config.max_num_seqs, weights=config.tenant_weights
            )
