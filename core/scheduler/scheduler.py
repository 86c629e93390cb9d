"""Decide which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase. A request has computed tokens and expected tokens,
and each step computes more of them until the two counts are equal.

Where each rule lives: `Scheduler._fit` preempts running requests when blocks run out, and the
queue's `choose_victim` picks which; `admission.py` admits waiting requests and records why others
wait; `running.py` shares a step's tokens among running requests; `lifecycle.py` starts, preempts
and finishes requests, which allocates and frees their blocks; `step_results.py` applies the
outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ...protocol.block_hash import HashBlocks, block_hasher
from ...protocol.config import CacheConfig, KVTransferConfig, SchedulerConfig
from ...protocol.kv_cache_groups import FULL_ATTENTION, KVCacheGroup
from ...protocol.kv_events import KVCacheEvent
from ...protocol.messages import (
    AppendInputs,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)
from ...protocol.worker_messages import (
    DraftTokenIds,
    HeldRequest,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from ..kv_cache.connector import KVConnector
from ..kv_cache.event_log import KVEventLog
from ..kv_cache.manager import KVCacheManager
from ..state.batch import StepInFlight
from ..state.request import Request, RequestKey
from ..state.running_requests import RunningRequests
from ..state.slots import SlotArray, Slots, as_array
from .admission import Admission
from .client_outputs import ClientOutputs
from .decode_fast_path import DecodeFastPath
from .features.encoder_cache_connector import EncoderCacheConnector
from .features.encoder_inputs import EncoderInputs
from .features.grammars import GrammarBackend, Grammars
from .features.injected_preemption import choose_injected_preemption
from .features.lora_cache import LoraCache
from .features.poison_isolation import CrashSuspects
from .features.speculative import make_drafts
from .features.state_checkpoints import StateCheckpoints
from .growing_inputs import GrowingInputs
from .interface import SchedulerInterface
from .invariants import check_invariants
from .kv_transfers import make_transfers
from .lifecycle import RequestLifecycle
from .limits import Requirements, check_config
from .micro_batches import make_micro_batches
from .queues.admission_delay import AdmissionDelay
from .queues.admission_stop import AdmissionStop
from .queues.factory import make_queue, make_tenant_limits
from .queues.partial_prefills import PartialPrefills
from .queues.request_queue import WaitReason
from .running import RunningPlan, RunningScheduler
from .step_results import StepResults
from .step_writer import StepWriter

INVARIANT_CHECK_INTERVAL: Final = 1000
"""Number of steps between two checks of the invariants."""


class Scheduler(SchedulerInterface):
    """The scheduler of one replica, over a KV cache of `num_blocks` blocks.

    All `kv_cache_groups` share these blocks. `kv_connector` and its configuration `kv_transfer` must be given together.

    Raises:
        ConfigError: Two settings contradict each other.
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
        check_config(config, max_model_len, num_blocks)
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
            token_unit=config.token_unit,
        )
        self._running = RunningRequests(self.slots, config.max_num_seqs, config.diffusion)
        self._queue = make_queue(config, self._running)
        self._grammars = Grammars(structured_output, vocab_size)
        self._clients = ClientOutputs(core_index)
        self._encoders = EncoderInputs(config, encoder_cache_connector)
        self.loras = LoraCache(config.max_cpu_loras)
        self._drafts = make_drafts(config, kv_cache_groups, self._running, self._grammars)
        self.lifecycle = lifecycle = RequestLifecycle(
            requirements=Requirements.from_config(
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
            loras=self.loras,
            tenants=make_tenant_limits(config),
            drafts=self._drafts,
        )
        self.requests = lifecycle.requests
        self._transfers = make_transfers(kv_connector, kv_transfer, lifecycle)
        self._growing = GrowingInputs(lifecycle)
        self._results = StepResults(lifecycle, self._drafts, self._transfers)
        micro_batches = make_micro_batches(
            config, self._results, has_drafts=self._drafts is not None
        )
        self._partial_prefills = PartialPrefills(config, cache_config, max_model_len)
        self._queue.long_prompt_tokens = self._partial_prefills.long_prompt_tokens
        checkpoints = StateCheckpoints(config, cache_config, kv_cache_groups)
        self._running_scheduler = RunningScheduler(
            config,
            lifecycle,
            partial_prefills=self._partial_prefills,
            checkpoints=checkpoints,
            encoders=self._encoders,
            drafts=self._drafts,
            micro_batches=micro_batches,
        )
        factor = config.scheduler_delay_factor
        self._delay = AdmissionDelay(factor) if factor else None
        self._admission = Admission(
            config,
            lifecycle,
            running_scheduler=self._running_scheduler,
            partial_prefills=self._partial_prefills,
            checkpoints=checkpoints,
            encoders=self._encoders,
            drafts=self._drafts,
            delay=self._delay,
            transfers=self._transfers,
        )
        self._writer = StepWriter(self._running, self.kv_cache_manager, self._drafts)
        self._fast_path: DecodeFastPath | None = None
        if DecodeFastPath.is_possible(config, lifecycle):
            self._fast_path = DecodeFastPath(
                config,
                lifecycle,
                encoders=self._encoders,
                drafts=self._drafts,
                results=self._results,
            )
        self._step = 0
        self.invariant_violations: list[str] = []

    # Requests and clients

    def add_client(self, client_index: int) -> None:
        """Prepare to send outputs to a client, which considers the core idle until it gets statistics."""
        self._clients.add_client(client_index)
        self.lifecycle.reported_counts = 0, 0

    def finish_client(self, client_index: int) -> None:
        """Abort all requests of a disconnected client, and free the blocks that are held for its requests."""
        keys = [key for key in self.requests if key[0] == client_index]
        if self._transfers is not None:
            keys += self._transfers.find_held(client_index)
        self.finish_requests(keys, FinishReason.ABORT)
        self._clients.remove_client(client_index)

    def adopt_blocks(self, held: Sequence[HeldRequest]) -> None:
        """Keep the blocks that a previous core left in the workers' KV cache."""
        if self._transfers is None or self._transfers.blocks is not None:
            # If requests get slots before their loads end, adopted blocks may belong to a load whose failure only the
            # previous core had recorded.
            self.lifecycle.handoff.adopt_blocks(held)

    def end_adoption(self, client_index: int) -> None:
        """Release the adopted blocks of a client that no request has claimed."""
        self.lifecycle.handoff.release_unclaimed(client_index)

    def add_request(self, client_index: int, message: EngineCoreRequest, now: float) -> None:
        """Queue a request."""
        request = self.lifecycle.add_request(client_index, message, now)
        if request is not None and self._delay is not None:
            self._delay.add_request(request)

    def append_inputs(self, client_index: int, message: AppendInputs) -> None:
        """Append encoder inputs to an open request."""
        self._growing.append_inputs(client_index, message)

    def grammar_ready(self, key: RequestKey, error: str | None) -> None:
        """Record that a grammar is compiled, or failed to compile."""
        self.lifecycle.grammar_ready(key, error)

    def lora_loaded(self, number: int, error: str | None) -> None:
        """Record that all workers have answered a `LoraLoad`."""
        self.lifecycle.end_lora_load(number, error)

    def finish_requests(
        self, keys: Iterable[RequestKey], reason: FinishReason, message: str = ""
    ) -> None:
        """Finish requests before their last token. An abort of one that has finished frees the blocks held for it."""
        keys = list(keys)
        if self._transfers is not None and reason is FinishReason.ABORT:
            self._transfers.release_held(keys)
        requests = {key: self.requests[key] for key in keys if key in self.requests}
        self.lifecycle.finish_requests(
            [(request, reason, None, message) for request in requests.values()]
        )

    def reset_prefix_cache(self, reset_running_requests: bool = False, now: float = 0.0) -> bool:
        """Remove all cached prefixes. Return False while any block is in use."""
        if reset_running_requests:
            for slot in self._running.order.tolist():
                self.lifecycle.preempt(slot, now, keeps_tokens=False)
            self.lifecycle.drop_tokens_in_flight(self.lifecycle.in_flight.preempted)
            while self.lifecycle.reservations.reclaim_latest():
                pass
        return self.kv_cache_manager.reset_prefix_cache()

    # Planning a step

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Decide the next step, or return None if there is nothing to do."""
        return self._repeat_step(now) or self._plan_step(now)

    def _repeat_step(self, now: float) -> SchedulerOutput | None:
        """Repeat the last step if nothing that affects the next one has changed, else return None."""
        if self._fast_path is None:
            return None
        step = self._fast_path.repeat_step(self._step + 1, now)
        self._step += step is not None
        return step

    def _plan_step(self, now: float) -> SchedulerOutput | None:
        """Plan the next step from the current state."""
        if self._fast_path is not None:
            self._fast_path.stop()
        suspect = self.lifecycle.poison_isolation.next_suspect()
        if suspect is not None:
            if self._results.has_steps_in_flight:
                self._admission.admit_none(AdmissionStop.ISOLATION)
                return None
            step = self._schedule(now, suspect)
            if step is not None:
                return step
        return self._schedule(now, None)

    def _schedule(self, now: float, suspect: Request | None) -> SchedulerOutput | None:
        """Plan a step. If `suspect` is given, plan a step that runs only this suspected request.

        Return None if there is nothing to do, or if `suspect` cannot run now.
        """
        self.kv_cache_manager.pool.lifetimes.now = now
        self.lifecycle.finish_expired(now)
        if self._transfers is not None:
            self._transfers.expire(now)
        chance, slots = self._config.inject_preemption, self._running.order
        slot = choose_injected_preemption(chance, self._step, slots)
        if slot is not None:
            self.lifecycle.preempt(slot, now)
        may_admit = slot is None
        if self._encoders.are_in_use:
            self._growing.vacate_idle_slot(now)
            self._encoders.release_computed(self.slots.num_computed_tokens)
        if self.kv_cache_manager.tables.has_windows:
            self.kv_cache_manager.free_unseen_blocks(
                self._running.order, may_be_rejected=self._drafts is not None
            )
        plan, has_preempted = self._fit(
            self._running_scheduler.plan(self._slots_except(suspect)), now, suspect
        )
        may_admit = may_admit and not has_preempted
        max_admitted = self.slots.num_free if may_admit else 0
        if may_admit and self._queue and suspect is None:
            displaced = self._admission.preempt_for_waiting(plan, now)
            if displaced is not None:
                # Preemption frees encoder-cache space, so other requests may compute more now.
                plan, has_preempted = self._fit(displaced, now)
                max_admitted = 0 if has_preempted else 1
        samples = self._running_scheduler.apply_plan(plan)
        admitted = self._admission.admit(plan, max_admitted, now, suspect)
        if not (
            plan.num_tokens
            or admitted.requests
            or self._running.has_removed
            or self.loras.has_unsent
        ):
            if suspect is not None:
                # A step without `suspect` is planned next, and carries the connector's metadata.
                return None
            is_in_flight = self._results.has_steps_in_flight
            if self._transfers is None or not self._transfers.needs_step(is_in_flight):
                return None
        self._step += 1
        step, in_flight = self._writer.write(self._step, plan, samples, admitted, now)
        self._results.add_step(in_flight)
        self._running.awaiting_masks.update(
            row.request.slot
            for row in in_flight.constrained
            if self._grammars.is_isolated(row.request)
        )
        self._writer.count_step(self.lifecycle.stats, plan, admitted)
        step.lora_loads = self.loras.take_loads()
        if self._transfers is not None:
            self._transfers.add_metadata(step)
        if self._encoders.are_in_use:
            self._encoders.add_work(step)
        if self._fast_path is not None:
            self._fast_path.start(step, in_flight)
        return step

    def _fit(
        self, plan: RunningPlan, now: float, suspect: Request | None = None
    ) -> tuple[RunningPlan, bool]:
        """Preempt running requests until the free blocks suffice for the plan.

        Return the plan for the remaining requests, and whether any request was preempted.
        """
        has_preempted = False
        while True:
            if plan.encoders is not None and plan.encoders.failed:
                self.lifecycle.fail_requests(plan.encoders.failed)
            elif plan.growth.total <= self.kv_cache_manager.pool.num_free:
                return plan, has_preempted
            elif self.lifecycle.reservations.reclaim_latest():
                continue
            else:
                # The suspect is never preempted: all others wait for its token.
                others = self._slots_except(suspect)
                slots = as_array(others) if others else self._running.order
                self.lifecycle.preempt(self._queue.choose_victim(slots), now)
                self.lifecycle.stats.num_block_preemptions += 1
                has_preempted = True
            plan = self._running_scheduler.plan(self._slots_except(suspect))

    def _slots_except(self, suspect: Request | None) -> list[int]:
        """Return the slots of all running requests except `suspect`; none if `suspect` is None."""
        if suspect is None:
            return []
        return [slot for slot in self._running.order.tolist() if slot != suspect.slot]

    # Applying outputs

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> bytes:
        """Return the token bitmasks of the step's constrained rows."""
        rows = self._results.get_step(scheduler_output.step).constrained
        if self._drafts is not None:
            rows = self._drafts.add_drafts(rows, self.lifecycle.in_flight)
        return self._grammars.bitmask(rows)

    def get_forced_tokens(self, scheduler_output: SchedulerOutput) -> DraftTokenIds | None:
        """Return the tokens that grammars force after the step's last tokens."""
        if self._drafts is None:
            return None
        return self._drafts.get_forced_tokens(self._results.get_step(scheduler_output.step))

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        now: float,
    ) -> dict[int, EngineCoreOutputs]:
        """Apply the output of the oldest step in flight."""
        if scheduler_output.step % INVARIANT_CHECK_INTERVAL == 0:
            violations = self.check_invariants()
            self.invariant_violations += violations
            self.lifecycle.stats.num_invariant_violations += len(violations)
        step, outputs = self._results.apply_output(scheduler_output, model_runner_output, now)
        self._partial_prefills.pace.record_step(step, now)
        if step.has_prefill and self._delay is not None:
            self._delay.record_prefill(now - step.scheduled_at)
        return outputs

    def update_from_connector(self, rank: int, output: KVConnectorOutput, now: float) -> None:
        """Apply a report of the workers that arrived without a step output."""
        if self._transfers is not None:
            self._transfers.apply_message(rank, output, now)

    def update_draft_token_ids(self, drafts: DraftTokenIds) -> None:
        """Apply drafts that arrived after their step's output."""
        self._results.apply_drafts(drafts)

    def take_outputs(self, now: float) -> dict[int, EngineCoreOutputs]:
        """Return messages about requests that finished outside of a step, with statistics if no step will send them."""
        is_idle = not self.requests
        has_stats = is_idle and self._transfers is not None and self._transfers.has_counts
        if is_idle or not self._results.has_steps_in_flight:
            has_stats |= self.lifecycle.reported_counts != self.get_request_counts()
        outputs = self._clients.take_finished_outputs(now, has_stats=has_stats)
        if outputs and (is_idle or has_stats):
            next(iter(outputs.values())).stats = self.make_stats()
        return outputs

    def take_kv_events(self) -> list[KVCacheEvent]:
        """Return the KV-cache events since the last call."""
        events = self._kv_events.take_events() if self._kv_events else []
        if self._transfers is not None:
            events += self._transfers.connector.take_events()
        return events

    # State for the core loop and for tests

    def get_kv_cache_usage(self) -> float:
        """Return the fraction of KV-cache blocks in use, from 0 to 1."""
        return self.kv_cache_manager.pool.usage

    def find_crash_suspects(self) -> CrashSuspects:
        """Return the requests in the steps in flight."""
        return self._results.find_crash_suspects()

    def get_step_in_flight(self, scheduler_output: SchedulerOutput) -> StepInFlight:
        """Return the record of a step whose output has not arrived yet."""
        return self._results.get_step(scheduler_output.step)

    @property
    def last_slots(self) -> SlotArray:
        """The slots of the last scheduled step, in the order of its rows."""
        return self._writer.last_slots

    @property
    def admission_stop(self) -> AdmissionStop:
        """The reason why the last step admitted no further request."""
        return self._admission.stop

    def why_waiting(self, request: Request) -> WaitReason | AdmissionStop:
        """Return why a request in the queue was not admitted to the last step."""
        return self._admission.why_waiting(request)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of waiting and running requests."""
        return len(self.requests)

    def has_finished_requests(self) -> bool:
        """Return whether slots were freed that no step message has reported to the workers yet."""
        return self._running.has_removed

    def has_requests(self) -> bool:
        """Return whether there is anything to compute or to send."""
        return (
            bool(self.requests)
            or self._running.has_removed
            or (self._transfers is not None and self._transfers.have_work)
        )

    @property
    def kv_connector(self) -> KVConnector | None:
        """The KV connector, if there is one."""
        return None if self._transfers is None else self._transfers.connector

    def shutdown(self) -> None:
        """Shut the KV connector down."""
        if self._transfers is not None:
            self._transfers.connector.shutdown()

    def get_request_counts(self) -> tuple[int, int]:
        """Return the numbers of running and waiting requests."""
        return len(self._running), self.lifecycle.num_waiting

    def check_invariants(self) -> list[str]:
        """Return a description of each count that is wrong; empty if all agree."""
        return check_invariants(self.lifecycle)

    def make_stats(self) -> SchedulerStats:
        """Return current gauges, and counts since the last call."""
        return self.lifecycle.make_stats()
