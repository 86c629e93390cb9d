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

from ..protocol.arrays import BoolArray, Int32Array, Int64Array, int32_bytes
from ..protocol.block_hash import hash_blocks
from ..protocol.config import (
    CacheConfig,
    KVTransferConfig,
    SchedulerConfig,
    SchedulingPolicy,
    SpeculativeConfig,
)
from ..protocol.errors import ConfigError
from ..protocol.kv_cache_groups import (
    FULL_ATTENTION,
    AttentionKind,
    KVCacheGroup,
    max_request_tokens,
)
from ..protocol.kv_events import KVCacheEvent
from ..protocol.messages import (
    DraftTokenIds,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
)
from .admission_delay import AdmissionDelay
from .admission_end import AdmissionEnd
from .batch import Batch, StepInFlight, Tenure
from .cached_prefix import CachedPrefix
from .client_outputs import ClientOutputs
from .conservation import find_violations
from .drafts import Drafts
from .encoder_cache_connector import EncoderCacheConnector
from .encoder_cache_manager import EncoderCacheManager
from .encoder_inputs import EncoderInputs, EncoderPlan
from .fair_queue import FairQueue
from .grammars import GrammarBackend, Grammars
from .interface import SchedulerInterface
from .kv_cache_manager import BlockTables, Growth, HashBlocks, KVCacheManager, Prefix
from .kv_connector import KVConnector, create_connector
from .kv_event_log import KVEventLog
from .kv_transfers import KVTransfers
from .partial_prefills import PartialPrefills
from .request import Request, RequestKey
from .request_lifecycle import RequestLifecycle
from .request_queue import DeadlineQueue, FCFSQueue, Obstacle, PriorityQueue, RequestQueue
from .requirements import Requirements
from .running_requests import RunningRequests
from .slots import SlotArray, Slots
from .step_results import StepResults

CONSERVATION_INTERVAL: Final = 1000
"""Steps between two counts of what must add up."""

MAX_STEPS_IN_FLIGHT: Final = 4
"""More are never sent before the output of the first is in."""


class _RunningPlan(NamedTuple):
    """What the running requests would compute: `granted` of the `wanted` tokens each, up to `computed`.

    Of the wanted tokens `needed` are no drafts. `encoders` is None when nobody who runs needs an encoder. `share` is the most that a prompt gets in the step, unless more of it would finish the prompt.
    """

    slots: SlotArray
    needed: Int64Array
    wanted: Int64Array
    granted: Int64Array
    computed: Int64Array
    growth: Growth
    num_tokens: int
    share: int
    encoders: EncoderPlan | None


class _Admissions(NamedTuple):
    """Rows that enter a step in the making, and those of them that load blocks in it."""

    requests: list[NewRequestData]
    granted: list[int]
    samples: list[bool]
    loading: list[Tenure]


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
        hash_blocks: HashBlocks = hash_blocks,
        kv_connector: KVConnector | None = None,
        kv_transfer: KVTransferConfig | None = None,
        speculative: SpeculativeConfig | None = None,
        encoder_cache_connector: EncoderCacheConnector | None = None,
    ) -> None:
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} is below "
                f"max_model_len={max_model_len}, which only chunked prefill allows"
            )
        if num_blocks < 2:
            raise ConfigError(f"the KV cache has {num_blocks} blocks and needs at least 2")
        if kv_transfer is not None and (kv_cache_groups != FULL_ATTENTION or num_host_blocks):
            raise ConfigError(
                f"kv_connector={kv_transfer.kv_connector!r} moves the blocks of full attention alone, "
                "neither those of layers with a window or a state nor those of a host tier: "
                "remove it, or --kv-host-gib"
            )
        if speculative is not None and any(
            group.kind is AttentionKind.STATE_SPACE for group in kv_cache_groups
        ):
            raise ConfigError(
                f"num_speculative_tokens={speculative.num_speculative_tokens}: a state-space layer "
                "cannot take back a rejected draft; the model has such layers"
            )
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
            hash_blocks=hash_blocks,
        )
        self._running = RunningRequests(self.slots, config.max_num_seqs)
        self._queue = _make_queue(config, self._running)
        self._grammars = Grammars(structured_output, vocab_size)
        self._clients = ClientOutputs(core_index)
        encoder_budget = config.max_num_encoder_input_tokens or config.max_num_batched_tokens
        encoder_cache_size = config.encoder_cache_size or config.max_num_batched_tokens
        self._encoders = EncoderInputs(
            EncoderCacheManager(encoder_cache_size),
            encoder_budget,
            may_split=not config.disable_chunked_mm_input,
            connector=encoder_cache_connector,
        )
        self._lifecycle = RequestLifecycle(
            requirements=Requirements(
                vocab_size=vocab_size,
                max_model_len=max_model_len,
                block_size=cache_config.block_size,
                num_blocks=num_blocks - 1,
                has_grammars=structured_output is not None,
                max_num_queued_reqs=config.max_num_queued_reqs,
                max_num_queued_tokens=config.max_num_queued_tokens,
                max_encoder_input_size=min(encoder_budget, encoder_cache_size),
                max_step_tokens=config.max_num_batched_tokens,
                splits_prompts=config.enable_chunked_prefill,
                splits_encoder_inputs=not config.disable_chunked_mm_input,
                max_computed_tokens=max_request_tokens(
                    kv_cache_groups,
                    num_blocks - 1,
                    config.max_num_batched_tokens + _max_uncertain_tokens(speculative),
                    cache_config.block_size,
                    max_model_len,
                ),
            ),
            manager=self.kv_cache_manager,
            running=self._running,
            queue=self._queue,
            clients=self._clients,
            grammars=self._grammars,
            encoders=self._encoders,
        )
        self.requests = self._lifecycle.requests
        self._transfers: KVTransfers | None = None
        if kv_transfer is not None:
            connector = kv_connector or create_connector(kv_transfer)
            self._transfers = KVTransfers(connector, kv_transfer, self._lifecycle)
            self._lifecycle.transfers = self._transfers
        self._max_loras = config.max_loras
        self._drafts: Drafts | None = None
        if speculative is not None:
            self._drafts = Drafts(
                speculative,
                self._running,
                self._grammars,
                uses_placeholders=config.async_scheduling,
            )
        self._results = StepResults(self._lifecycle, self._drafts)
        self._blocked: tuple[Request, int] | None = None
        self._num_common_blocks = 0
        self._last_batch = Batch(self._running.order, self.slots)
        self._step = 0
        self.admission_end = AdmissionEnd.ALL_ADMITTED
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
            while self._transfers is not None and self._transfers.take_back():
                pass
        return self.kv_cache_manager.reset_prefix_cache()

    # the next step

    def schedule(self, now: float) -> SchedulerOutput | None:
        self.kv_cache_manager.pool.lifetimes.now = now
        self._lifecycle.expire(now)
        if self._transfers is not None:
            self._transfers.begin_step(now)
        may_admit = not self._inject_preemption(now)
        if self._encoders.are_in_use:
            self._encoders.begin_step(self.slots.num_computed_tokens)
        if self.kv_cache_manager.has_windows:
            may_be_rejected = self._drafts is not None
            self.kv_cache_manager.begin_step(self._running.order, may_be_rejected=may_be_rejected)
        plan = self._plan_running()
        while plan.growth.total > self.kv_cache_manager.pool.num_free:
            if self._transfers is not None and self._transfers.take_back():
                continue
            self._lifecycle.preempt(self._queue.victim(), now)
            may_admit = False
            plan = self._plan_running()
        if plan.encoders is not None and plan.encoders.failed:
            self._fail_all(plan.encoders.failed)
            return self.schedule(now)
        max_admitted = self.slots.num_free if may_admit else 0
        if may_admit and self._queue:
            displaced = self._displace(plan, now)
            if displaced is not None:
                plan, max_admitted = displaced, 1
        samples = self._carry_out(plan)
        admitted = self._admit(plan, max_admitted, now)
        if not (plan.num_tokens or admitted.requests or self._running.has_removed):
            is_in_flight = self._results.is_anything_expected
            if self._transfers is None or not self._transfers.needs_step(is_in_flight):
                return None
        step = self._make_step(plan, samples, admitted, now)
        if self._transfers is not None:
            self._transfers.describe(step)
        if self._encoders.are_in_use:
            self._encoders.describe(step)
        return step

    def _plan_running(self, without: Sequence[int] = ()) -> _RunningPlan:
        """What the running requests may compute. The blocks for it may be lacking."""
        state = self.slots
        slots = self._running.order
        if without:
            slots = slots[np.isin(slots, without, invert=True)]
        computed = state.num_computed_tokens[slots]
        most = state.max_computed_tokens[slots]
        needed = wanted = np.minimum(state.num_expected_tokens[slots], most)
        needed -= computed
        if self._drafts is not None:
            is_decoding = (needed == 1) & ~self._is_prefilling(slots)
            wanted = needed + self._drafts.count(slots, is_decoding, most - computed - needed)
        granted, share = self._limit(slots, wanted)
        encoders = None
        if self._encoders.are_in_use:
            encoders = self._encoders.begin_plan()
            granted = self._fit_encoder_inputs(encoders, slots, computed, granted)
        computed += granted
        to_hold = computed
        if self._drafts is not None:
            to_hold = np.minimum(computed + self._drafts.num_lookahead_tokens, most)
        growth = self.kv_cache_manager.plan_growth(slots, to_hold)
        return _RunningPlan(
            slots, needed, wanted, granted, computed, growth, int(granted.sum()), share, encoders
        )

    def _fit_encoder_inputs(
        self, plan: EncoderPlan, slots: SlotArray, computed: Int64Array, granted: Int64Array
    ) -> Int64Array:
        """Let no prompt go further than its encoder inputs do."""
        fitted = granted.copy()
        spare = self._config.max_num_batched_tokens - int(granted.sum())
        for slot in self._running.prefilling:
            request = self._running[slot]
            rows = (slots == slot).nonzero()[0] if request.encoder_inputs else slots[:0]
            row = int(rows[0]) if len(rows) else -1
            if row < 0 or not granted[row]:
                continue
            start, count = int(computed[row]), int(granted[row])
            end = self._encoders.fit(plan, request, start, start + count, start + count + spare)
            fitted[row] = end - start
            spare += count - (end - start)
        return fitted

    def _fail_all(self, reasons: dict[Request, str]) -> None:
        for request, reason in reasons.items():
            self._lifecycle.finish(request, FinishReason.ERROR, message=reason)

    def _is_prefilling(self, slots: SlotArray) -> BoolArray:
        return np.isin(slots, list(self._running.prefilling))

    def _limit(self, slots: SlotArray, wanted: Int64Array) -> tuple[Int64Array, int]:
        """Cut what the running requests want to the limits of a step, first come first served.

        Returns the tokens granted, and the share of each prompt.
        """
        limits = self._partial_prefills
        prefilling = self._running.prefilling
        if prefilling:
            is_prefill = self._is_prefilling(slots)
            num_decodes = int(wanted[~is_prefill].sum())
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
        if request.lora_name and not self._has_lora_slot(request):
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
        prefix = manager.find_prefix(request)
        granted = self._first_chunk(request.num_tokens - prefix.num_tokens, budget, plan.share)
        if not granted:
            return False
        num_tokens = self._with_lookahead(request, prefix.num_tokens + granted)
        lacking = manager.count_needed(prefix.blocks, num_tokens, without) + plan.growth.total
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
            samples &= plan.granted >= plan.needed
        if plan.encoders is not None:
            self._encoders.carry_out(plan.encoders)
        state.num_computed_tokens[slots] = plan.computed
        state.num_expected_tokens[slots] += samples
        if self._drafts is not None:
            state.num_expected_tokens[slots] += _num_drafts(plan, samples)
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
        admitted = _Admissions([], [], [], [])
        budget = self._config.max_num_batched_tokens - plan.num_tokens
        if not (queue and max_admitted and budget > 0):
            self.admission_end = (
                AdmissionEnd.TOKENS
                if max_admitted
                else AdmissionEnd.PREEMPTION
                if self.slots.num_free
                else AdmissionEnd.SEQUENCES
            )
            return admitted
        partial = [self._running[slot].num_tokens for slot in self._running.prefilling]
        num_partial, num_long = len(partial), sum(map(limits.is_long, partial))
        if not limits.are_long_at_limit(num_long):
            queue.recall(Obstacle.LONG_PREFILLS)
        if len(self._running.loras) < self._max_loras:
            queue.recall(Obstacle.LORA_SLOTS)
        queue.recall(Obstacle.CONNECTOR)
        while budget > 0 and len(admitted.requests) < max_admitted:
            if plan.encoders is not None:
                plan.encoders.undo(0)
            request = queue.peek()
            if request is None:
                self.admission_end = AdmissionEnd.ALL_ADMITTED
                break
            if self._blocked and self._is_blocked(request):
                self.admission_end = AdmissionEnd.BLOCKS
                break
            if self._delay.factor and self._delay.holds_back(request, now) and len(self._running):
                self.admission_end = AdmissionEnd.DELAY
                break
            if request.lora_name and not self._has_lora_slot(request):
                queue.set_aside(Obstacle.LORA_SLOTS)
                continue
            prefix = manager.find_prefix(request)
            num_external = 0
            if self._transfers is not None:
                match = self._transfers.match(request, prefix)
                if match is None or match.is_async:
                    if match is None and not request.is_finished:
                        queue.set_aside(Obstacle.CONNECTOR)
                    elif match is not None and not self._load(
                        self._transfers, request, prefix, match.num_tokens
                    ):
                        self.admission_end = AdmissionEnd.BLOCKS
                        break
                    continue
                num_external = match.num_tokens
            num_computed = prefix.num_tokens + num_external
            wanted = request.num_tokens - num_computed
            granted = self._first_chunk(wanted, budget, plan.share)
            if request.encoder_inputs and plan.encoders is not None:
                most = num_computed + (budget if granted else 0)
                end = self._encoders.fit(
                    plan.encoders, request, num_computed, num_computed + granted, most
                )
                granted = end - num_computed
                if granted < wanted and not self._config.enable_chunked_prefill:
                    granted = 0
                if plan.encoders.failed:
                    self._fail_all(plan.encoders.failed)
                    plan.encoders.failed.clear()
                    continue
            is_partial = granted < wanted
            is_long = is_partial and limits.is_long(request.num_tokens)
            if not granted:
                self.admission_end = AdmissionEnd.TOKENS
                break
            if is_partial and limits.are_at_limit(num_partial):
                self.admission_end = AdmissionEnd.PARTIAL_PREFILLS
                break
            if is_long and limits.are_long_at_limit(num_long):
                queue.set_aside(Obstacle.LONG_PREFILLS)
                continue
            num_tokens = num_computed + granted
            if self._drafts is not None:
                num_tokens = self._with_lookahead(request, num_tokens)
            tables = manager.allocate(prefix.blocks, num_tokens)
            if tables is None:
                tables = self._allocate(request, prefix.blocks, num_tokens)
                if tables is None:
                    self.admission_end = AdmissionEnd.BLOCKS
                    break
            if self._transfers is not None:
                if num_external and not self._transfers.allocated(request, tables[0], num_external):
                    continue
                self._transfers.started(request)
            num_partial += is_partial
            num_long += is_long
            data = self._lifecycle.start(request, tables, prefix, num_external, granted, now)
            if plan.encoders is not None:
                self._encoders.carry_out(plan.encoders)
            admitted.requests.append(data)
            admitted.granted.append(granted)
            admitted.samples.append(not is_partial)
            if num_external:
                admitted.loading.append(Tenure(request, request.num_admissions))
            budget -= granted
        else:
            self.admission_end = AdmissionEnd.TOKENS if budget <= 0 else AdmissionEnd.SEQUENCES
        return admitted

    def _with_lookahead(self, request: Request, num_tokens: int) -> int:
        """How many tokens blocks are needed for, for so many to be computed."""
        if self._drafts is None:
            return num_tokens
        most = request.num_prompt_tokens + self._lifecycle.max_output_tokens(request) - 1
        return min(num_tokens + self._drafts.num_lookahead_tokens, most)

    def _has_lora_slot(self, request: Request) -> bool:
        loras = self._running.loras
        return request.lora_name in loras or len(loras) < self._max_loras

    def _allocate(
        self, request: Request, computed_blocks: CachedPrefix, num_tokens: int
    ) -> BlockTables | None:
        """Blocks for the first request of the queue; None, and it is remembered, if they do not fit."""
        manager = self.kv_cache_manager
        while (tables := manager.allocate(computed_blocks, num_tokens)) is None:
            # Nobody who runs will make room: those who wait with blocks behind this request must.
            if self._running or self._transfers is None or not self._transfers.take_back(request):
                self._blocked = request, manager.pool.num_openings
                break
        return tables

    def _load(
        self, transfers: KVTransfers, request: Request, prefix: Prefix, num_external: int
    ) -> bool:
        """Let the first request of the queue wait for an asynchronous load. False if its blocks do not fit."""
        num_tokens = prefix.num_tokens + num_external
        tables = self._allocate(request, prefix.blocks, num_tokens)
        if tables is None:
            return False
        (blocks,) = tables
        if transfers.allocated(request, blocks, num_external):
            self._lifecycle.count_lookup(request, prefix, num_external)
            transfers.begin_load(request, blocks, num_tokens)
        return True

    def _make_step(
        self,
        plan: _RunningPlan,
        samples: BoolArray,
        admitted: _Admissions,
        now: float,
    ) -> SchedulerOutput:
        """Write down what was decided: for the workers, and for the output to come."""
        slots, granted = plan.slots, plan.granted
        num_drafts = _num_drafts(plan, samples) if self._drafts is not None else None
        if not granted.all():
            positions = granted.nonzero()[0]
            slots, granted, samples = slots[positions], granted[positions], samples[positions]
            if num_drafts is not None:
                num_drafts = num_drafts[positions]
        if admitted.requests:
            new_slots = np.array([request.slot for request in admitted.requests], np.intp)
            slots = np.concatenate((slots, new_slots))
            granted = np.concatenate((granted, np.array(admitted.granted, np.int64)))
            samples = np.concatenate((samples, np.array(admitted.samples, np.bool_)))
            if num_drafts is not None:
                num_drafts = np.concatenate((num_drafts, np.zeros(len(new_slots), np.int64)))
        last = self._last_batch
        is_same = np.array_equal(slots, last.slots)
        if not is_same or last.num_vacated != self.slots.num_vacated:
            self._last_batch = Batch(slots.copy(), self.slots)
            self._num_common_blocks = self.kv_cache_manager.count_common_blocks(slots)
        batch = self._last_batch
        sampling = batch if samples.all() else batch.select(samples)
        drafts = draft_token_ids = b""
        if num_drafts is not None and self._drafts is not None:
            drafted = num_drafts.nonzero()[0]
            drafts = int32_bytes(np.stack((drafted, num_drafts[drafted]), 1))
            taken = self._drafts.take(slots, num_drafts)
            draft_token_ids = taken.tobytes()
            constrained = self._constrained_rows_with_drafts(sampling, num_drafts[samples], taken)
        else:
            constrained = self._constrained_rows(sampling)
        prefilled = self._running.take_completed_prefills()
        has_prefill = bool(prefilled or self._running.prefilling)
        self._step += 1
        self._results.expect(
            StepInFlight(
                self._step,
                batch,
                sampling,
                prefilled,
                constrained,
                now,
                has_prefill,
                admitted.loading,
                num_drafts[samples] if num_drafts is not None and drafts else None,
            )
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
            drafts=drafts,
            draft_token_ids=draft_token_ids,
            host_copies_out=copies_out,
            host_copies_in=copies_in,
            num_common_blocks=self._num_common_blocks,
        )

    def _constrained_rows_with_drafts(
        self, sampling: Batch, num_drafts: Int64Array, draft_token_ids: Int32Array
    ) -> list[Tenure]:
        """The constrained rows and their drafts. Only rows that sample have drafts."""
        if not self._running.num_constrained:
            return []
        starts = np.cumsum(num_drafts) - num_drafts
        rows = {row.request.slot: row for row in self._constrained_rows(sampling)}
        for slot, start, count in zip(
            sampling.slots.tolist(), starts.tolist(), num_drafts.tolist(), strict=True
        ):
            if slot in rows and count:
                known = draft_token_ids[start : start + count].tolist()
                rows[slot] = rows[slot]._replace(num_drafts=count, draft_token_ids=known or None)
        return list(rows.values())

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
        rows = self._results.expected(scheduler_output.step).constrained
        if self._drafts is not None:
            rows = [
                row._replace(draft_token_ids=self._drafts.find(row.request.slot)[: row.num_drafts])
                if row.num_drafts and row.draft_token_ids is None and row.is_alive
                else row
                for row in rows
            ]
        return self._grammars.bitmask(rows)

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

    def update_draft_token_ids(self, drafts: DraftTokenIds) -> None:
        self._results.take_drafts(drafts)

    def take_outputs(self, now: float) -> dict[int, EngineCoreOutputs]:
        return self._clients.take_urgent(now)

    def take_kv_events(self) -> list[KVCacheEvent]:
        events = self._kv_events.take() if self._kv_events else []
        if self._transfers is not None:
            events += self._transfers.connector.take_events()
        return events

    # questions

    def count_samples(self, scheduler_output: SchedulerOutput) -> int:
        """How many tokens the output of a step in flight will have."""
        return len(self._results.expected(scheduler_output.step).sampling)

    @property
    def last_slots(self) -> SlotArray:
        """The rows of the last step."""
        return self._last_batch.slots

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def has_finished_requests(self) -> bool:
        return self._running.has_removed

    def has_requests(self) -> bool:
        is_waiting = self._transfers is not None and self._transfers.are_outstanding
        return super().has_requests() or is_waiting

    def get_kv_connector(self) -> KVConnector | None:
        return self._transfers.connector if self._transfers is not None else None

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.connector.shutdown()

    def get_request_counts(self) -> tuple[int, int]:
        return len(self._running), self._lifecycle.num_waiting

    def find_violations(self) -> list[str]:
        """Every conserved quantity that is not, in words."""
        return find_violations(self.requests, self._running, self._queue, self.kv_cache_manager)

    def make_stats(self) -> SchedulerStats:
        return self._lifecycle.make_stats()


def _max_uncertain_tokens(speculative: SpeculativeConfig | None) -> int:
    """Beyond the tokens that are certain, those that steps in flight may verify of one request."""
    if speculative is None:
        return 0
    return MAX_STEPS_IN_FLIGHT * (speculative.num_speculative_tokens + 1)


def _num_drafts(plan: _RunningPlan, samples: BoolArray) -> Int64Array:
    """How many drafts each row verifies."""
    return np.where(samples, plan.granted - plan.needed, 0)


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
