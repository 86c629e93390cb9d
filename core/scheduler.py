"""Which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase: a request has computed tokens and expected tokens, and
each step gives it tokens until the first catch up with the second. Running requests are handled
at once, in array operations; a single one is visited only when something happens to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

import msgspec

from ..protocol.block_hash import HashBlocks, block_hasher
from ..protocol.config import (
    CacheConfig,
    KVTransferConfig,
    SchedulerConfig,
    SchedulingPolicy,
)
from ..protocol.errors import ConfigError
from ..protocol.kv_cache_groups import (
    FULL_ATTENTION,
    AttentionKind,
    KVCacheGroup,
)
from ..protocol.kv_events import KVCacheEvent
from ..protocol.messages import (
    DraftTokenIds,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    HeldRequest,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from .admission import Admission
from .admission_delay import AdmissionDelay
from .admission_end import AdmissionEnd
from .backlog import TenantLimits
from .client_outputs import ClientOutputs
from .conservation import find_violations
from .drafts import Drafts
from .encoder_cache_connector import EncoderCacheConnector
from .encoder_inputs import EncoderInputs
from .fair_queue import FairQueue
from .grammars import GrammarBackend, Grammars
from .interface import SchedulerInterface
from .kv_cache_manager import KVCacheManager
from .kv_connector import KVConnector
from .kv_event_log import KVEventLog
from .kv_transfers import KVTransfers
from .micro_batches import MicroBatches
from .partial_prefills import PartialPrefills
from .quarantine import Accused
from .request import Request, RequestKey
from .request_lifecycle import RequestLifecycle
from .request_queue import DeadlineQueue, FCFSQueue, Obstacle, PriorityQueue, RequestQueue
from .requirements import Requirements
from .running_pass import RunningPass, RunningPlan
from .running_requests import RunningRequests
from .slots import SlotArray, Slots, as_array
from .steady_decode import SteadyDecode
from .step_results import StepResults
from .step_writer import StepWriter

CONSERVATION_INTERVAL: Final = 1000
"""Steps between two counts of what must add up."""


class Scheduler(SchedulerInterface):
    """One replica's scheduler over a KV cache of `num_blocks` blocks, which the `kv_cache_groups` share.

    `kv_transfer` is the configuration of the `kv_connector`: both are given or none.
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
        hash_blocks: HashBlocks | None = None,
        kv_connector: KVConnector | None = None,
        kv_transfer: KVTransferConfig | None = None,
        encoder_cache_connector: EncoderCacheConnector | None = None,
    ) -> None:
        _verify(config, max_model_len, num_blocks, num_host_blocks, kv_cache_groups, kv_transfer)
        self._config = config
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
            hash_blocks=hash_blocks or block_hasher(cache_config.prefix_hash),
        )
        self._running = RunningRequests(self.slots, config.max_num_seqs)
        self._queue = _make_queue(config, self._running)
        self._grammars = Grammars(structured_output, vocab_size)
        self._clients = ClientOutputs(core_index)
        self._encoders = EncoderInputs(config, encoder_cache_connector)
        self._lifecycle = lifecycle = RequestLifecycle(
            requirements=Requirements.of(
                config,
                vocab_size=vocab_size,
                max_model_len=max_model_len,
                block_size=cache_config.block_size,
                num_blocks=num_blocks - 1,
                kv_cache_groups=kv_cache_groups,
                has_grammars=structured_output is not None,
            ),
            manager=self.kv_cache_manager,
            running=self._running,
            queue=self._queue,
            clients=self._clients,
            grammars=self._grammars,
            encoders=self._encoders,
            tenants=_tenant_limits(config),
        )
        self.requests = lifecycle.requests
        self._transfers: KVTransfers | None = None
        if kv_transfer is not None:
            assert kv_connector is not None
            self._transfers = KVTransfers(kv_connector, kv_transfer, lifecycle)
            lifecycle.transfers = self._transfers
        self._drafts: Drafts | None = None
        if config.speculative is not None:
            self._drafts = Drafts(
                config.speculative,
                self._running,
                self._grammars,
                uses_placeholders=config.async_scheduling,
            )
        self._results = StepResults(lifecycle, self._drafts)
        micro_batches: MicroBatches | None = None
        if config.num_micro_batches > 1:
            micro_batches = MicroBatches(
                config.num_micro_batches, config.max_num_seqs, self._results
            )
        partial_prefills = PartialPrefills(config, cache_config, max_model_len)
        self._running_pass = RunningPass(
            config,
            lifecycle,
            partial_prefills=partial_prefills,
            encoders=self._encoders,
            drafts=self._drafts,
            micro_batches=micro_batches,
        )
        self._delay: AdmissionDelay | None = None
        if config.scheduler_delay_factor:
            self._delay = AdmissionDelay(config.scheduler_delay_factor)
        self._admission = Admission(
            config,
            lifecycle,
            running_pass=self._running_pass,
            partial_prefills=partial_prefills,
            encoders=self._encoders,
            drafts=self._drafts,
            delay=self._delay,
        )
        self._writer = StepWriter(self._running, self.kv_cache_manager, self._drafts)
        self._steady: SteadyDecode | None = None
        if SteadyDecode.is_possible(config, lifecycle):
            self._steady = SteadyDecode(
                config,
                lifecycle,
                encoders=self._encoders,
                drafts=self._drafts,
                results=self._results,
            )
        self._step = 0
        self.violations: list[str] = []

    # what comes from outside

    def add_client(self, client_index: int) -> None:
        self._clients.open(client_index)

    def finish_client(self, client_index: int) -> None:
        keys = [key for key in self.requests if key[0] == client_index]
        self.finish_requests(keys, FinishReason.ABORT)
        self._clients.close(client_index)

    def inherit(self, held: Sequence[HeldRequest]) -> None:
        if self._transfers is None:
            # With a connector some blocks may hold a failed load, which only the earlier core knew.
            self._lifecycle.inheritance.begin(held)

    def end_inheritance(self, client_index: int) -> None:
        self._lifecycle.inheritance.end(client_index)

    def add_request(self, client_index: int, message: EngineCoreRequest, now: float) -> None:
        request = self._lifecycle.add(client_index, message, now)
        if request is not None and self._delay is not None:
            self._delay.arrived(request)

    def grammar_ready(self, key: RequestKey, error: str | None) -> None:
        self._lifecycle.grammar_ready(key, error)

    def finish_requests(
        self, keys: Iterable[RequestKey], reason: FinishReason, message: str = ""
    ) -> None:
        requests = {key: self.requests[key] for key in keys if key in self.requests}
        self._lifecycle.finish_all(
            [(request, reason, None, message) for request in requests.values()]
        )

    def reset_prefix_cache(self, reset_running_requests: bool = False, now: float = 0.0) -> bool:
        if reset_running_requests:
            for slot in self._running.order.tolist():
                self._lifecycle.preempt(slot, now)
            while self._lifecycle.reservations.take_back():
                pass
        return self.kv_cache_manager.reset_prefix_cache()

    # the next step

    def schedule(self, now: float) -> SchedulerOutput | None:
        return self._repeat(now) or self._plan(now)

    def _repeat(self, now: float) -> SchedulerOutput | None:
        """The step before once more, if nothing has happened that the next one depends on."""
        step = self._steady.repeat(self._step + 1, now) if self._steady is not None else None
        if step is not None:
            self._step += 1
        return step

    def _plan(self, now: float) -> SchedulerOutput | None:
        """The next step, planned anew."""
        if self._steady is not None:
            self._steady.end()
        tried = self._lifecycle.quarantine.next()
        if tried is not None:
            if self._results.is_anything_expected:
                self._admission.admit_none(AdmissionEnd.QUARANTINE)
                return None
            step = self._schedule(now, tried)
            if step is not None:
                return step
        return self._schedule(now, None)

    def _schedule(self, now: float, tried: Request | None) -> SchedulerOutput | None:
        """The next step. With a suspect to be `tried` it computes that request alone, and is None if it cannot."""
        self.kv_cache_manager.pool.lifetimes.now = now
        self._lifecycle.expire(now)
        if self._transfers is not None:
            self._transfers.begin_step(now)
        may_admit = not self._inject_preemption(now)
        if self._encoders.are_in_use:
            self._encoders.begin_step(self.slots.num_computed_tokens)
        if self.kv_cache_manager.tables.has_windows:
            may_be_rejected = self._drafts is not None
            self.kv_cache_manager.begin_step(self._running.order, may_be_rejected=may_be_rejected)
        plan, has_preempted = self._fit(self._running_pass.plan(self._beside(tried)), now, tried)
        may_admit = may_admit and not has_preempted
        max_admitted = self.slots.num_free if may_admit else 0
        if may_admit and self._queue and tried is None:
            displaced = self._admission.displace(plan, now)
            if displaced is not None:
                # Requests that waited for a victim's room in the encoder cache may compute more now.
                plan, has_preempted = self._fit(displaced, now)
                max_admitted = 0 if has_preempted else 1
        samples = self._running_pass.carry_out(plan)
        admitted = self._admission.admit(plan, max_admitted, now, tried)
        if not (plan.num_tokens or admitted.requests or self._running.has_removed):
            if tried is not None:
                # The connector's message goes with the step that is scheduled without `tried`.
                return None
            is_in_flight = self._results.is_anything_expected
            if self._transfers is None or not self._transfers.needs_step(is_in_flight):
                return None
        self._step += 1
        step, in_flight = self._writer.write(self._step, plan, samples, admitted, now)
        self._results.expect(in_flight)
        stats = self._lifecycle.stats
        stats.num_steps += 1
        stats.num_scheduled_tokens += plan.num_tokens + sum(admitted.granted)
        if self._transfers is not None:
            self._transfers.describe(step)
        if self._encoders.are_in_use:
            self._encoders.describe(step)
        if self._steady is not None:
            self._steady.begin(step, in_flight)
        return step

    def _fit(
        self, plan: RunningPlan, now: float, tried: Request | None = None
    ) -> tuple[RunningPlan, bool]:
        """A plan for which the blocks suffice, and whether running requests were preempted for it."""
        has_preempted = False
        while True:
            if plan.encoders is not None and plan.encoders.failed:
                self._lifecycle.fail_all(plan.encoders.failed)
            elif plan.growth.total <= self.kv_cache_manager.pool.num_free:
                return plan, has_preempted
            elif self._lifecycle.reservations.take_back():
                continue
            else:
                # A tried request is never preempted: all others wait for its token.
                others = self._beside(tried)
                slots = as_array(others) if others else self._running.order
                self._lifecycle.preempt(self._queue.victim(slots), now)
                has_preempted = True
            plan = self._running_pass.plan(self._beside(tried))

    def _beside(self, tried: Request | None) -> list[int]:
        """The slots of all but the one request that is tried."""
        if tried is None:
            return []
        return [slot for slot in self._running.order.tolist() if slot != tried.slot]

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
                msgspec.structs.replace(
                    row, draft_token_ids=self._drafts.find(row.request.slot)[: row.num_drafts]
                )
                if row.num_drafts and row.draft_token_ids is None and row.is_alive
                else row
                for row in rows
            ]
        return self._grammars.bitmask(rows)

    def get_forced_tokens(self, scheduler_output: SchedulerOutput) -> DraftTokenIds | None:
        if self._drafts is None:
            return None
        return self._drafts.forced(self._results.expected(scheduler_output.step))

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
        if step.has_prefill and self._delay is not None:
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

    def get_kv_cache_usage(self) -> float:
        return self.kv_cache_manager.pool.usage

    def find_accused(self) -> Accused:
        return self._results.find_accused()

    def count_samples(self, scheduler_output: SchedulerOutput) -> int:
        """How many tokens the output of a step in flight will have."""
        return len(self._results.expected(scheduler_output.step).sampling)

    @property
    def last_slots(self) -> SlotArray:
        """The rows of the last step."""
        return self._writer.last_slots

    @property
    def admission_end(self) -> AdmissionEnd:
        """Why the last step admitted no further request."""
        return self._admission.end

    def why_waiting(self, request: Request) -> Obstacle | AdmissionEnd:
        """Why a request in the queue is not in the last step."""
        return self._admission.why_waiting(request)

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def has_finished_requests(self) -> bool:
        return self._running.has_removed

    def has_requests(self) -> bool:
        return (
            bool(self.requests)
            or self._running.has_removed
            or (self._transfers is not None and self._transfers.are_outstanding)
        )

    def get_kv_connector(self) -> KVConnector | None:
        return self._transfers.connector if self._transfers is not None else None

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.connector.shutdown()

    def get_request_counts(self) -> tuple[int, int]:
        return len(self._running), self._lifecycle.num_waiting

    def find_violations(self) -> list[str]:
        """Every sum that does not add up, in words."""
        return find_violations(self.requests, self._running, self._queue, self.kv_cache_manager)

    def make_stats(self) -> SchedulerStats:
        return self._lifecycle.make_stats()


def _verify(
    config: SchedulerConfig,
    max_model_len: int,
    num_blocks: int,
    num_host_blocks: int,
    kv_cache_groups: tuple[KVCacheGroup, ...],
    kv_transfer: KVTransferConfig | None,
) -> None:
    """Raises ConfigError for what contradicts itself."""
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
    has_state = any(group.kind is AttentionKind.STATE_SPACE for group in kv_cache_groups)
    if config.speculative is not None and has_state:
        raise ConfigError(
            f"num_speculative_tokens={config.speculative.num_speculative_tokens}: a state-space "
            "layer cannot take back a rejected draft; the model has such layers"
        )


def _tenant_limits(config: SchedulerConfig) -> TenantLimits | None:
    limits = config.max_num_seqs_per_tenant, config.max_num_queued_reqs_per_tenant
    return TenantLimits(*limits) if any(limits) else None


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
