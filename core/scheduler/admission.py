"""Admit waiting requests into a step, once the running requests have been given their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ...protocol.config import SchedulerConfig
from ...protocol.file_identity import LoraAdapter
from ...protocol.worker_messages import NewRequestData
from ..kv_cache.cached_prefix import Deferred
from ..kv_cache.external_load import ExternalLoad
from ..kv_cache.manager import Claim, Prefix
from ..state.batch import ScheduledRow
from ..state.request import Request
from .features.encoder_inputs import EncoderInputs, EncoderPlan
from .features.speculative import Drafts
from .features.state_checkpoints import StateCheckpoints
from .kv_transfers import KVTransfers
from .lifecycle import RequestLifecycle
from .queues.admission_delay import AdmissionDelay
from .queues.admission_stop import AdmissionStop
from .queues.partial_prefills import PartialPrefills
from .queues.request_queue import WaitReason
from .running import RunningPlan, RunningScheduler

MAX_SENT_TOKENS: Final = 1 << 24
"""Maximum number of tokens that the new requests of one step may contain; a longer request is admitted alone."""

LORA_MAX_WAIT_S: Final = 1.0
"""Seconds after which a request that waits for a LoRA slot stops later requests from joining the loaded adapters."""


class Admissions(NamedTuple):
    """The requests admitted to a step, as parallel lists in order of admission.

    `granted` is the number of tokens that each request computes, and `samples` is true if it samples a token. `loading`
    are the requests whose blocks a KV connector loads within this step.
    """

    requests: list[NewRequestData]
    granted: list[int]
    samples: list[bool]
    loading: list[ScheduledRow]


class _Room:
    """The rest of a step that waiting requests may use, and the requests admitted so far.

    The requests in `starts` have blocks but no slots yet; they are started together. Other requests can find their
    blocks only after the start. `first_hashes` holds, per request, the hash of the first block that it will compute.
    """

    def __init__(self, plan: RunningPlan, most: int, partial: list[bool], now: float) -> None:
        """Start with what `plan` leaves of a step of at most `most` tokens.

        `partial` has one entry per prompt that is being computed in chunks; it is true if that prompt is long.
        """
        self.now = now
        self.budget = plan.num_left
        self.num_unused = most - plan.num_tokens
        self.share = plan.share
        self.encoders = plan.encoders
        self.num_sent = 0
        self.num_partial = len(partial)
        self.num_long = sum(partial)
        self.starts: list[Claim] = []
        self.first_hashes: set[bytes] = set()
        self.admitted = Admissions([], [], [], [])


class Admission:
    """Admits waiting requests in queue order, and records why the others wait."""

    def __init__(
        self,
        config: SchedulerConfig,
        lifecycle: RequestLifecycle,
        *,
        running_scheduler: RunningScheduler,
        partial_prefills: PartialPrefills,
        checkpoints: StateCheckpoints,
        encoders: EncoderInputs,
        drafts: Drafts | None,
        delay: AdmissionDelay | None,
        transfers: KVTransfers | None,
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._manager = lifecycle.manager
        self._queue = lifecycle.queue
        self._running = lifecycle.running
        self._loras = lifecycle.loras
        self._tenants = lifecycle.tenants
        self._transfers = transfers
        self._in_flight = lifecycle.in_flight
        self._running_scheduler = running_scheduler
        self._partial_prefills = partial_prefills
        self._checkpoints = checkpoints
        self._encoders = encoders
        self._num_lookahead_tokens = drafts.num_lookahead_tokens if drafts is not None else 0
        self._delay = delay
        self._num_left_free = int(config.watermark * self._manager.pool.num_blocks)
        """The number of blocks that an admission leaves free while other requests run."""
        self._starts_singly = (
            transfers is not None
            or lifecycle.tenants is not None
            or lifecycle.queue.charges_for_computing
            or delay is not None
        )
        """True if each request must start before the next one is considered, because the start affects it."""
        self._lora_turn: Request | None = None
        """The request that waited longest for a LoRA slot; its adapter gets the next slot that becomes unused."""
        self.stop = AdmissionStop.NONE_LEFT
        """The reason why the last step admitted no further request."""
        self._has_looked = False
        """True if the last step considered the requests in the queue."""

    def why_waiting(self, request: Request) -> WaitReason | AdmissionStop:
        """Return why a request in the queue was not admitted to the last step."""
        wait_reason = self._queue.get_wait_reason(request) if self._has_looked else None
        return self.stop if wait_reason is None else wait_reason

    def admit_none(self, end: AdmissionStop) -> Admissions:
        """Record why nothing is admitted, and return an empty admission."""
        self.stop = end
        self._has_looked = False
        return Admissions([], [], [], [])

    def preempt_for_waiting(self, plan: RunningPlan, now: float) -> RunningPlan | None:
        """Preempt lower-priority requests if that lets the first waiting request run.

        Return the plan of the remaining running requests, which may need more blocks than are
        free. Return None, and preempt nothing, if the request fits anyway or would not fit even
        then.
        """
        request = self._queue.peek_request()
        if request is None or self._lifecycle.blocked.is_blocked(request):
            return None
        if self._wait_reason(request, now) is not None or self._in_flight.has_earlier_preempted(
            request
        ):
            return None
        candidates = self._queue.find_preemptible(request)
        if not candidates or self._has_room(request, plan):
            return None
        if not self._has_room(request, self._running_scheduler.plan(candidates), candidates):
            return None
        for slot in candidates:
            self._lifecycle.preempt(slot, now)
            plan = self._running_scheduler.plan()
            if self._has_room(request, plan):
                break
        return plan

    def _has_room(self, request: Request, plan: RunningPlan, without: Sequence[int] = ()) -> bool:
        """Return whether a waiting request fits into the step next to `plan`, once the slots `without` are vacated."""
        manager = self._manager
        budget = plan.num_left
        if budget <= 0 or not (self._running.slots.num_free or without):
            return False
        prefix = manager.find_prefix(request)
        wanted = self._running.end_of_prefill(request) - prefix.num_tokens
        granted = self._first_chunk(wanted, budget, plan.share)
        if not granted:
            return False
        num_tokens = self._with_lookahead(request, prefix.num_tokens + granted)
        lacking = (
            manager.count_needed(request, prefix.blocks, num_tokens, without) + plan.growth.total
        )
        num_left = self._num_left_free if len(self._running) > len(without) else 0
        return lacking + num_left <= manager.pool.num_free

    def _first_chunk(self, wanted: int, budget: int, share: int) -> int:
        """Return how many tokens a request may start with; 0 if it must wait for a larger budget."""
        if not self._config.enable_chunked_prefill:
            return wanted if wanted <= budget else 0
        granted = min(self._partial_prefills.cap(wanted, share), budget)
        return self._running.passes.fit(granted, wanted)

    def admit(
        self, plan: RunningPlan, max_admitted: int, now: float, suspect: Request | None = None
    ) -> Admissions:
        """Admit waiting requests while tokens, slots and blocks last; if `suspect` is given, only that one."""
        queue, suspects, delay = self._queue, self._lifecycle.poison_isolation.suspects, self._delay
        if not max_admitted:
            has_slot = self._running.slots.num_free > 0
            return self.admit_none(
                AdmissionStop.PREEMPTION if has_slot else AdmissionStop.SEQUENCES
            )
        if plan.num_left <= 0:
            return self.admit_none(AdmissionStop.TOKENS)
        if not queue:
            return self.admit_none(AdmissionStop.NONE_LEFT)
        self._has_looked = True
        running, is_long = self._running, self._partial_prefills.is_long
        partial = [is_long(running[slot].num_tokens) for slot in running.prefilling]
        room = _Room(plan, self._config.max_num_batched_tokens, partial, now)
        granted = room.admitted.granted
        self._put_back_unblocked(room.num_long)
        end: AdmissionStop | None = None
        while end is None and room.budget > 0 and len(granted) < max_admitted:
            request = queue.peek_request()
            if request is None:
                end = AdmissionStop.NONE_LEFT
            elif request is not suspect and (suspect or request.key in suspects):
                end = AdmissionStop.ISOLATION
            elif self._lifecycle.blocked.is_blocked(request):
                end = AdmissionStop.BLOCKS
            elif delay is not None and delay.must_wait(request, now) and len(running):
                end = AdmissionStop.DELAY
            elif self._in_flight.preempted and self._in_flight.has_earlier_preempted(request):
                end = AdmissionStop.TOKENS_IN_FLIGHT
            elif (wait_reason := self._wait_reason(request, now)) is not None:
                queue.set_aside(wait_reason)
            elif granted and room.num_sent + request.num_sent_tokens > MAX_SENT_TOKENS:
                end = AdmissionStop.MESSAGE
            else:
                end = self._admit(request, room)
        if end is None:
            is_full = len(granted) == max_admitted
            end = AdmissionStop.SEQUENCES if is_full else AdmissionStop.TOKENS
        self.stop = end
        self._start(room)
        return room.admitted

    def _put_back_unblocked(self, num_long: int) -> None:
        """Put back the requests that were set aside for a reason that no longer holds.

        `num_long` is the number of long prompts that are being computed in chunks.
        """
        queue = self._queue
        if not self._partial_prefills.are_long_at_limit(num_long):
            queue.put_back(WaitReason.LONG_PREFILLS)
        if self._loras.take_ended_loads():
            queue.put_back(WaitReason.LORA_LOADING)
        has_lora_slot = self._has_lora_slot()
        if has_lora_slot:
            queue.put_back(WaitReason.LORA_SLOTS)
        if self._lora_turn is not None and (has_lora_slot or self._lora_turn.is_finished):
            self._lora_turn = None
            queue.put_back(WaitReason.LORA_TURN)
        if self._tenants is not None:
            for name, num_seqs in self._tenants.take_openings():
                queue.put_back_tenant(name, num_seqs)
        queue.put_back(WaitReason.CONNECTOR)

    def _wait_reason(self, request: Request, now: float) -> WaitReason | None:
        """Return a reason to set the request aside (LoRA adapter or tenant limit), or None.

        Its cached prefix is not examined.
        """
        if request.lora is not None:
            wait_reason = self._lora_wait_reason(request, request.lora, now)
            if wait_reason is not None:
                return wait_reason
        if self._tenants is not None and not self._tenants.may_run(request.tenant):
            return WaitReason.TENANT
        return None

    def _admit(self, request: Request, room: _Room) -> AdmissionStop | None:
        """Admit the first request of the queue. Return the reason if admission stops here.

        If the result is None, the request was admitted, set aside or finished, is loading, or must be considered again.
        """
        manager, limits, transfers = self._manager, self._partial_prefills, self._transfers
        if room.encoders is not None:
            # An earlier request may have planned inputs and then not been admitted.
            room.encoders.undo(0)
        prefix = self._find_prefix(request)
        hashes, num_cached_blocks = request.block_hashes, prefix.num_cached_blocks
        first_hash = hashes[num_cached_blocks] if num_cached_blocks < len(hashes) else None
        if first_hash in room.first_hashes and not prefix.is_reserved:
            # A request admitted to this step computes this block, which becomes findable when it starts.
            self._start(room)
            prefix = self._find_prefix(request)
            first_hash = request.block_hash(prefix.num_cached_blocks)
        num_external = 0
        if transfers is not None:
            match = transfers.match_external_prefix(request, prefix)
            if match is not None and match.is_async:
                num_tokens = prefix.num_tokens + match.num_tokens
                return self._load(transfers, request, prefix, prefix, num_tokens)
            longer = None if match is None else transfers.find_longer_prefix(request, prefix)
            if request.is_finished:
                return None
            if match is None or longer is Deferred.DEFERRED:
                self._queue.set_aside(WaitReason.CONNECTOR)
                return None
            if longer is not None:
                return self._load(transfers, request, prefix, longer, longer.num_tokens)
            num_external = match.num_tokens
        num_computed = prefix.num_tokens + num_external
        granted = wanted = self._running.end_of_prefill(request) - num_computed
        if wanted > room.budget or wanted > room.share:
            granted = self._first_chunk(wanted, room.budget, room.share)
        end_if_none = AdmissionStop.TOKENS
        if request.encoder_inputs and room.encoders is not None:
            end_if_none = AdmissionStop.ENCODERS if granted else AdmissionStop.TOKENS
            granted = self._fit_encoder_inputs(room, room.encoders, request, num_computed, granted)
            if request.is_finished:
                return None
        if not granted:
            return end_if_none
        if self._checkpoints.are_in_use:
            num_shared = request.num_shared_tokens = manager.count_shared_tokens(request)
            granted = self._checkpoints.cut(num_computed, granted, request.num_tokens, num_shared)
        is_partial = granted < wanted
        is_long = is_partial and limits.is_long(request.num_tokens)
        if is_partial and limits.are_at_limit(room.num_partial):
            return AdmissionStop.PARTIAL_PREFILLS
        if is_long and limits.are_long_at_limit(room.num_long):
            self._queue.set_aside(WaitReason.LONG_PREFILLS)
            return None
        num_tokens = num_computed + granted
        if self._num_lookahead_tokens:
            num_tokens = self._with_lookahead(request, num_tokens)
        claim = self._claim(request, prefix, num_tokens, bool(room.starts))
        if claim is None:
            if room.starts:
                # Starting the requests allocated free blocks, which may have been part of this prefix, so look it up
                # again.
                self._start(room)
                return None
            return self._make_room(request)
        if transfers is not None:
            manager.allocate_claimed([claim])
            if num_external and not transfers.update_after_alloc(
                request, claim.tables[0], prefix.num_tokens, num_external
            ):
                return None
        if request.num_reserved_tokens:
            self._lifecycle.reservations.end_reservation(request)
        self._queue.pop_request()
        claim.num_external, claim.num_granted = num_external, granted
        room.starts.append(claim)
        room.admitted.granted.append(granted)
        room.admitted.samples.append(not is_partial)
        if first_hash is not None:
            room.first_hashes.add(first_hash)
        if self._starts_singly or room.encoders is not None or request.lora is not None:
            self._start(room)
            if room.encoders is not None:
                self._encoders.apply_plan(room.encoders)
            if num_external:
                room.admitted.loading.append(ScheduledRow(request, request.num_admissions))
        room.budget -= granted
        room.num_unused -= granted
        room.num_sent += request.num_sent_tokens
        room.num_partial += is_partial
        room.num_long += is_long
        return None

    def _claim(
        self, request: Request, prefix: Prefix, num_tokens: int, has_starts: bool = False
    ) -> Claim | None:
        """Claim blocks for a request. While others run, leave some free, so that these can grow without preemption."""
        others_run = has_starts or len(self._running) > 0
        num_left = self._num_left_free if others_run else 0
        return self._manager.claim_blocks(request, prefix, num_tokens, num_left)

    def _fit_encoder_inputs(
        self, room: _Room, encoders: EncoderPlan, request: Request, num_computed: int, granted: int
    ) -> int:
        """Return how many tokens a request may compute, given which of its encoder inputs can be scheduled.

        Return 0 if the request failed because an input is unavailable.
        """
        most = num_computed + (room.num_unused if granted else 0)
        end = self._encoders.fit_inputs(
            encoders, request, num_computed, num_computed + granted, most
        )
        if encoders.failed:
            self._lifecycle.fail_requests(encoders.failed)
            encoders.failed.clear()
            return 0
        is_whole = end == request.num_tokens
        return end - num_computed if is_whole or self._config.enable_chunked_prefill else 0

    def _start(self, room: _Room) -> None:
        """Start the requests that have been admitted but not started."""
        if room.starts:
            room.admitted.requests.extend(self._lifecycle.start_requests(room.starts, room.now))
            room.starts.clear()
            room.first_hashes.clear()

    def _with_lookahead(self, request: Request, num_tokens: int) -> int:
        """Return for how many tokens a request needs blocks, including drafts, to compute up to `num_tokens`."""
        most = request.num_prompt_tokens + self._lifecycle.max_output_tokens(request) - 1
        return min(num_tokens + self._num_lookahead_tokens, most)

    def _lora_wait_reason(
        self, request: Request, lora: LoraAdapter, now: float
    ) -> WaitReason | None:
        """Return why the adapter of a request cannot be used now, or None if it can."""
        loras = self._running.loras
        if lora not in loras:
            if not (self._has_lora_slot() or self._loras.is_pending(lora)):
                if loras:
                    return WaitReason.LORA_SLOTS
                # Adapters were loaded for requests that cannot start now, for example because of their tenant's limit.
                # With no adapter in use nothing would ever free a slot, so let this request take the place of one.
                self._loras.release_all()
            if self._loras.is_loaded(lora):
                return None
            self._loras.begin_load(lora, loras)
            return WaitReason.LORA_LOADING
        if self._has_lora_slot():
            return None
        if self._lora_turn is None:
            before = now - LORA_MAX_WAIT_S
            self._lora_turn = self._queue.find_first_aside(WaitReason.LORA_SLOTS, before)
        turn = self._lora_turn
        if turn is None or (request.rank, request.arrival) < (turn.rank, turn.arrival):
            return None
        return WaitReason.LORA_TURN

    def _has_lora_slot(self) -> bool:
        """Return whether one more adapter may be used in a step, given `max_loras`."""
        return len(self._running.loras) + self._loras.num_pending < self._config.max_loras

    def _find_prefix(self, request: Request) -> Prefix:
        """Return the longest prefix to start a request from.

        If the cache holds more than its reserved blocks, release those.
        """
        prefix = self._manager.find_prefix(request)
        if request.num_reserved_tokens and not prefix.is_reserved:
            # Reserved blocks may be copies of cached ones. Releasing a copy makes it blank, so the prefix may be stale.
            self._lifecycle.reservations.end_reservation(request)
            prefix = self._manager.find_prefix(request)
        return prefix

    def _make_room(self, request: Request) -> AdmissionStop | None:
        """Free reserved blocks for the first request of the queue, because its own blocks do not fit.

        Return None if the request must be considered again, because a block of its prefix may have been freed.
        Otherwise record the failure, so that the attempt is not repeated before the state of the pool changes.
        """
        # With nothing running, only waiting requests that hold reserved blocks can free any.
        if not self._running and self._lifecycle.reservations.reclaim_latest(request):
            return None
        self._lifecycle.blocked.record(request)
        return AdmissionStop.BLOCKS

    def _load(
        self,
        transfers: KVTransfers,
        request: Request,
        prefix: Prefix,
        found: Prefix,
        num_tokens: int,
    ) -> AdmissionStop | None:
        """Let the first request wait for an asynchronous load of its tokens from the end of `prefix` to `num_tokens`.

        A `BlockConnector` loads the blocks by which `found` exceeds `prefix`. Other connectors load into new blocks,
        and `found` is `prefix`. Return the reason to stop admitting if the blocks do not fit.
        """
        claim = self._claim(request, found, num_tokens)
        if claim is None:
            return self._make_room(request)
        self._manager.allocate_claimed([claim])
        num_external, blocks = num_tokens - prefix.num_tokens, found.blocks
        external = [load for load in blocks.loads if load.is_external]
        load = ExternalLoad(
            request,
            num_external,
            num_tokens,
            [load.key for load in external],
            [blocks.blocks[load.group][load.position] for load in external],
        )
        if transfers.start_load(load, claim.tables):
            self._lifecycle.count_lookup(request, prefix, num_external)
        return None
