"""The second half of a step: which waiting requests enter it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ..protocol.config import SchedulerConfig
from ..protocol.messages import NewRequestData
from .admission_delay import AdmissionDelay
from .admission_end import AdmissionEnd
from .batch import Tenure
from .drafts import Drafts
from .encoder_inputs import EncoderInputs
from .kv_cache_manager import Claim, Prefix
from .kv_transfers import KVTransfers
from .partial_prefills import PartialPrefills
from .request import Request
from .request_lifecycle import RequestLifecycle, Start
from .request_queue import Obstacle
from .running_pass import RunningPass, RunningPlan

MAX_SENT_TOKENS: Final = 1 << 24
"""So many tokens go to the workers with the requests that enter a step; a request with more enters alone."""

LORA_PATIENCE_S: Final = 1.0
"""Once a request has waited so long for a slot for its adapter, those behind it leave the slots to run empty."""


class Admissions(NamedTuple):
    """Rows that enter a step in the making, and those of them that load blocks in it.

    The last of them still have to be started, together: `first_hashes` are of the first block of each that will be
    findable then and is not yet.
    """

    requests: list[NewRequestData]
    granted: list[int]
    samples: list[bool]
    loading: list[Tenure]
    starts: list[Start]
    first_hashes: set[bytes]


class Admission:
    """Admits in the order of the queue, beside what the running requests get of a step."""

    def __init__(
        self,
        config: SchedulerConfig,
        lifecycle: RequestLifecycle,
        *,
        running_pass: RunningPass,
        partial_prefills: PartialPrefills,
        encoders: EncoderInputs,
        drafts: Drafts | None,
        delay: AdmissionDelay,
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._manager = lifecycle.manager
        self._queue = lifecycle.queue
        self._running = lifecycle.running
        self._tenants = lifecycle.tenants
        self._transfers = lifecycle.transfers
        self._running_pass = running_pass
        self._partial_prefills = partial_prefills
        self._encoders = encoders
        self._drafts = drafts
        self._delay = delay
        self._blocked: tuple[Request, int] | None = None
        self._lora_turn: Request | None = None
        """Whose adapter gets the next slot that no running request needs, if it has waited long."""
        self.end = AdmissionEnd.NONE_LEFT
        """Why the last step admitted no further request."""
        self._was_closed = False
        """Whether that was so before it looked at any."""

    def why_waiting(self, request: Request) -> Obstacle | AdmissionEnd:
        """Why a request in the queue is not in the last step."""
        obstacle = None if self._was_closed else self._queue.obstacle_of(request)
        return self.end if obstacle is None else obstacle

    def close(self, end: AdmissionEnd) -> None:
        """The step admits no request."""
        self.end = end
        self._was_closed = True

    def displace(self, plan: RunningPlan, now: float) -> RunningPlan | None:
        """Preempt requests that the first waiting one may displace, if that makes room for it.

        Returns the plan for those that remain, whose blocks may be lacking; None, and nothing done, when it has room
        anyway or never.
        """
        request = self._queue.peek()
        if request is None or self._is_blocked(request):
            return None
        if request.lora_name and self._lora_obstacle(request, now) is not None:
            return None
        if self._tenants is not None and not self._tenants.may_run(request.tenant):
            return None
        candidates = self._queue.displaceable(request)
        if not candidates or self._has_room(request, plan):
            return None
        if not self._has_room(request, self._running_pass.plan(candidates), candidates):
            return None
        for slot in candidates:
            self._lifecycle.preempt(slot, now)
            plan = self._running_pass.plan()
            if self._has_room(request, plan):
                break
        return plan

    def _has_room(self, request: Request, plan: RunningPlan, without: Sequence[int] = ()) -> bool:
        """Whether a waiting request could be admitted beside the plan, were it not for some slots."""
        manager = self._manager
        budget = self._config.max_num_batched_tokens - plan.num_tokens
        if budget <= 0 or not (self._running.slots.num_free or without):
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
        return blocked is request and num_openings == self._manager.pool.num_openings

    def admit(
        self, plan: RunningPlan, max_admitted: int, now: float, tried: Request | None = None
    ) -> Admissions:
        """Admit waiting requests while tokens, slots and blocks last; only `tried`, if it is given."""
        queue, manager, limits = self._queue, self._manager, self._partial_prefills
        encoders, transfers, share = plan.encoders, self._transfers, plan.share
        suspects = self._lifecycle.quarantine.suspects
        admitted = Admissions([], [], [], [], [], set())
        budget = self._config.max_num_batched_tokens - plan.num_tokens
        num_sent = 0
        if not (queue and max_admitted and budget > 0):
            if max_admitted:
                self.close(AdmissionEnd.NONE_LEFT if budget > 0 else AdmissionEnd.TOKENS)
            elif self._running.slots.num_free:
                self.close(AdmissionEnd.PREEMPTION)
            else:
                self.close(AdmissionEnd.SEQUENCES)
            return admitted
        self._was_closed = False
        partial = [self._running[slot].num_tokens for slot in self._running.prefilling]
        num_partial, num_long = len(partial), sum(map(limits.is_long, partial))
        if not limits.are_long_at_limit(num_long):
            queue.put_back(Obstacle.LONG_PREFILLS)
        has_lora_slot = len(self._running.loras) < self._config.max_loras
        if has_lora_slot:
            queue.put_back(Obstacle.LORA_SLOTS)
        if self._lora_turn is not None and (has_lora_slot or self._lora_turn.is_finished):
            self._lora_turn = None
            queue.put_back(Obstacle.LORA_TURN)
        if self._tenants is not None:
            for name, num_seqs in self._tenants.take_openings():
                queue.put_back_of_tenant(name, num_seqs)
        queue.put_back(Obstacle.CONNECTOR)
        starts_singly = (
            transfers is not None
            or encoders is not None
            or queue.charges_for_computing
            or self._tenants is not None
            or self._delay.factor > 0
        )
        while budget > 0 and len(admitted.granted) < max_admitted:
            if encoders is not None:
                encoders.undo(0)
            request = queue.peek()
            if request is None:
                self.end = AdmissionEnd.NONE_LEFT
                break
            if request is not tried and (tried or request.key in suspects):
                self.end = AdmissionEnd.QUARANTINE
                break
            if self._blocked and self._is_blocked(request):
                self.end = AdmissionEnd.BLOCKS
                break
            if self._delay.factor and self._delay.holds_back(request, now) and len(self._running):
                self.end = AdmissionEnd.DELAY
                break
            if request.lora_name:
                obstacle = self._lora_obstacle(request, now)
                if obstacle is not None:
                    queue.set_aside(obstacle)
                    continue
            if self._tenants is not None and not self._tenants.may_run(request.tenant):
                queue.set_aside(Obstacle.TENANT)
                continue
            if admitted.granted and num_sent + request.num_tokens > MAX_SENT_TOKENS:
                self.end = AdmissionEnd.MESSAGE
                break
            prefix = manager.find_prefix(request)
            first_hash = request.block_hash(prefix.num_cached_blocks)
            if first_hash in admitted.first_hashes and not prefix.is_reserved:
                self._start(admitted, now)
                prefix = manager.find_prefix(request)
                first_hash = request.block_hash(prefix.num_cached_blocks)
            num_external = 0
            if transfers is not None:
                match = transfers.match(request, prefix)
                if match is None or match.is_async:
                    if match is None and not request.is_finished:
                        queue.set_aside(Obstacle.CONNECTOR)
                    elif match is not None and not self._load(
                        transfers, request, prefix, match.num_tokens
                    ):
                        self.end = AdmissionEnd.BLOCKS
                        break
                    continue
                num_external = match.num_tokens
            num_computed = prefix.num_tokens + num_external
            wanted = request.num_tokens - num_computed
            granted = wanted
            if wanted > budget or wanted > share:
                granted = self._first_chunk(wanted, budget, share)
            end_if_none = AdmissionEnd.ENCODERS if granted else AdmissionEnd.TOKENS
            if request.encoder_inputs and encoders is not None:
                most = num_computed + (budget if granted else 0)
                end = self._encoders.fit(
                    encoders, request, num_computed, num_computed + granted, most
                )
                granted = end - num_computed
                if granted < wanted and not self._config.enable_chunked_prefill:
                    granted = 0
                if encoders.failed:
                    self._lifecycle.fail_all(encoders.failed)
                    encoders.failed.clear()
                    continue
            is_partial = granted < wanted
            is_long = is_partial and limits.is_long(request.num_tokens)
            if not granted:
                self.end = end_if_none
                break
            if is_partial and limits.are_at_limit(num_partial):
                self.end = AdmissionEnd.PARTIAL_PREFILLS
                break
            if is_long and limits.are_long_at_limit(num_long):
                queue.set_aside(Obstacle.LONG_PREFILLS)
                continue
            num_tokens = num_computed + granted
            if self._drafts is not None:
                num_tokens = self._with_lookahead(request, num_tokens)
            claim = manager.claim(request, prefix, num_tokens)
            if claim is None and admitted.starts:
                # What was found may be evicted now: it is looked for again.
                self._start(admitted, now)
                continue
            if claim is None:
                claim = self._claim(request, prefix, num_tokens)
                if claim is None:
                    self.end = AdmissionEnd.BLOCKS
                    break
            if transfers is not None:
                manager.fulfil([claim])
                if num_external and not transfers.allocated(request, claim.tables[0], num_external):
                    continue
            if request.num_reserved_tokens:
                self._lifecycle.reservations.end(request)
            num_partial += is_partial
            num_long += is_long
            queue.pop()
            admitted.starts.append(Start(claim, num_external, granted))
            admitted.granted.append(granted)
            admitted.samples.append(not is_partial)
            if first_hash is not None:
                admitted.first_hashes.add(first_hash)
            if starts_singly or request.lora_name:
                self._start(admitted, now)
                if encoders is not None:
                    self._encoders.carry_out(encoders)
                if num_external:
                    admitted.loading.append(Tenure(request, request.num_admissions))
            budget -= granted
            num_sent += request.num_tokens
        else:
            is_full = len(admitted.granted) == max_admitted
            self.end = AdmissionEnd.SEQUENCES if is_full else AdmissionEnd.TOKENS
        self._start(admitted, now)
        return admitted

    def _start(self, admitted: Admissions, now: float) -> None:
        """Start who is admitted, where others are to be seen beside them, or at last."""
        if admitted.starts:
            admitted.requests.extend(self._lifecycle.start(admitted.starts, now))
            admitted.starts.clear()
            admitted.first_hashes.clear()

    def _with_lookahead(self, request: Request, num_tokens: int) -> int:
        """How many tokens blocks are needed for, for so many to be computed."""
        if self._drafts is None:
            return num_tokens
        most = request.num_prompt_tokens + self._lifecycle.max_output_tokens(request) - 1
        return min(num_tokens + self._drafts.num_lookahead_tokens, most)

    def _lora_obstacle(self, request: Request, now: float) -> Obstacle | None:
        """Why the adapter of a request cannot be used now."""
        loras = self._running.loras
        if len(loras) < self._config.max_loras:
            return None
        if request.lora_name not in loras:
            return Obstacle.LORA_SLOTS
        if self._lora_turn is None:
            before = now - LORA_PATIENCE_S
            self._lora_turn = self._queue.first_aside(Obstacle.LORA_SLOTS, before)
        turn = self._lora_turn
        if turn is None or (request.rank, request.arrival) < (turn.rank, turn.arrival):
            return None
        return Obstacle.LORA_TURN

    def _claim(self, request: Request, prefix: Prefix, num_tokens: int) -> Claim | None:
        """A claim of the first request of the queue; None, and it is remembered, if there are too few blocks."""
        manager = self._manager
        while (claim := manager.claim(request, prefix, num_tokens)) is None:
            # Nobody who runs will make room: those who wait with blocks behind this request must.
            if self._running or not self._lifecycle.reservations.take_back(request):
                self._blocked = request, manager.pool.num_openings
                break
        return claim

    def _load(
        self, transfers: KVTransfers, request: Request, prefix: Prefix, num_external: int
    ) -> bool:
        """Let the first request of the queue wait for an asynchronous load. False if its blocks do not fit."""
        num_tokens = prefix.num_tokens + num_external
        claim = self._claim(request, prefix, num_tokens)
        if claim is None:
            return False
        self._manager.fulfil([claim])
        (blocks,) = claim.tables
        if transfers.allocated(request, blocks, num_external):
            self._lifecycle.count_lookup(request, prefix, num_external)
            transfers.begin_load(request, blocks, num_tokens)
        return True
