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
from .encoder_inputs import EncoderInputs, EncoderPlan
from .kv_cache_manager import Claim, Prefix
from .kv_transfers import KVTransfers
from .partial_prefills import PartialPrefills
from .request import Request
from .request_lifecycle import RequestLifecycle, Start
from .request_queue import Obstacle
from .running_pass import RunningPass, RunningPlan

MAX_SENT_TOKENS: Final = 1 << 24
"""The most tokens that new requests bring into one step; a request with more enters alone."""

LORA_PATIENCE_S: Final = 1.0
"""A request that has waited so long for a slot for its adapter lets no later one keep the slots in use."""


class Admissions(NamedTuple):
    """The requests that enter a step in the making. `loading` are those for which it loads blocks."""

    requests: list[NewRequestData]
    granted: list[int]
    samples: list[bool]
    loading: list[Tenure]


class _Room:
    """What a step in the making has left for waiting requests, and which of them enter it.

    The requests of `starts` have their blocks, and are still to be started, all at once. That makes blocks findable:
    `first_hashes` has the hash of the first such block of each.
    """

    __slots__ = (
        "admitted",
        "budget",
        "encoders",
        "first_hashes",
        "now",
        "num_long",
        "num_partial",
        "num_sent",
        "share",
        "starts",
    )

    def __init__(self, plan: RunningPlan, budget: int, partial: list[bool], now: float) -> None:
        """`partial` tells of each prompt that is being computed piecewise whether it is long."""
        self.now = now
        self.budget = budget
        self.share = plan.share
        self.encoders = plan.encoders
        self.num_sent = 0
        self.num_partial = len(partial)
        self.num_long = sum(partial)
        self.starts: list[Start] = []
        self.first_hashes: set[bytes] = set()
        self.admitted = Admissions([], [], [], [])


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
        delay: AdmissionDelay | None,
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
        self._num_lookahead_tokens = drafts.num_lookahead_tokens if drafts is not None else 0
        self._delay = delay
        self._starts_singly = (
            lifecycle.transfers is not None
            or lifecycle.tenants is not None
            or lifecycle.queue.charges_for_computing
            or delay is not None
        )
        """Whether a request is started before the next one is looked at, because that depends on it."""
        self._blocked: tuple[Request, int] | None = None
        self._lora_turn: Request | None = None
        """A request that has waited long, if its adapter gets the next slot that no running request needs."""
        self.end = AdmissionEnd.NONE_LEFT
        """Why the last step admitted no further request."""
        self._has_looked = False
        """Whether the last step looked at the requests in the queue."""

    def why_waiting(self, request: Request) -> Obstacle | AdmissionEnd:
        """Why a request in the queue is not in the last step."""
        obstacle = self._queue.obstacle_of(request) if self._has_looked else None
        return self.end if obstacle is None else obstacle

    def admit_none(self, end: AdmissionEnd) -> Admissions:
        """What enters a step that no request may enter."""
        self.end = end
        self._has_looked = False
        return Admissions([], [], [], [])

    def displace(self, plan: RunningPlan, now: float) -> RunningPlan | None:
        """Preempt requests that the first waiting one may displace, if that makes room for it.

        Returns the plan for those that remain, whose blocks may be lacking; None, and nothing done, when it has room
        anyway or never.
        """
        request = self._queue.peek()
        if request is None or self._is_blocked(request):
            return None
        if self._obstacle(request, now) is not None:
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
        """Whether a waiting request could be admitted beside the plan, if the slots `without` were vacated."""
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
        return self._blocked == (request, self._manager.pool.num_openings)

    def admit(
        self, plan: RunningPlan, max_admitted: int, now: float, tried: Request | None = None
    ) -> Admissions:
        """Admit waiting requests while tokens, slots and blocks last; only `tried`, if it is given."""
        queue, suspects, delay = self._queue, self._lifecycle.quarantine.suspects, self._delay
        budget = self._config.max_num_batched_tokens - plan.num_tokens
        if not max_admitted:
            has_slot = self._running.slots.num_free > 0
            return self.admit_none(AdmissionEnd.PREEMPTION if has_slot else AdmissionEnd.SEQUENCES)
        if budget <= 0:
            return self.admit_none(AdmissionEnd.TOKENS)
        if not queue:
            return self.admit_none(AdmissionEnd.NONE_LEFT)
        self._has_looked = True
        running, is_long = self._running, self._partial_prefills.is_long
        partial = [is_long(running[slot].num_tokens) for slot in running.prefilling]
        room = _Room(plan, budget, partial, now)
        granted = room.admitted.granted
        self._put_back(room.num_long)
        end: AdmissionEnd | None = None
        while end is None and room.budget > 0 and len(granted) < max_admitted:
            request = queue.peek()
            if request is None:
                end = AdmissionEnd.NONE_LEFT
            elif request is not tried and (tried or request.key in suspects):
                end = AdmissionEnd.QUARANTINE
            elif self._is_blocked(request):
                end = AdmissionEnd.BLOCKS
            elif delay is not None and delay.holds_back(request, now) and len(running):
                end = AdmissionEnd.DELAY
            elif (obstacle := self._obstacle(request, now)) is not None:
                queue.set_aside(obstacle)
            elif granted and room.num_sent + request.num_tokens > MAX_SENT_TOKENS:
                end = AdmissionEnd.MESSAGE
            else:
                end = self._admit(request, room)
        if end is None:
            is_full = len(granted) == max_admitted
            end = AdmissionEnd.SEQUENCES if is_full else AdmissionEnd.TOKENS
        self.end = end
        self._start(room)
        return room.admitted

    def _put_back(self, num_long: int) -> None:
        """Put back the requests that were set aside for an obstacle that is gone.

        `num_long` long prompts are being computed piecewise.
        """
        queue = self._queue
        if not self._partial_prefills.are_long_at_limit(num_long):
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

    def _obstacle(self, request: Request, now: float) -> Obstacle | None:
        """Why a request is to be set aside, as far as that is known without looking up its prefix."""
        if request.lora_name:
            obstacle = self._lora_obstacle(request, now)
            if obstacle is not None:
                return obstacle
        if self._tenants is not None and not self._tenants.may_run(request.tenant):
            return Obstacle.TENANT
        return None

    def _admit(self, request: Request, room: _Room) -> AdmissionEnd | None:
        """Admit the first request of the queue. Returns why admission ends with it, if it does.

        A request that is neither admitted nor the end is set aside, finished or loading, or to be tried again at once.
        """
        manager, limits, transfers = self._manager, self._partial_prefills, self._transfers
        if room.encoders is not None:
            # The plan may have room for a request before this one that did not enter the step in the end.
            room.encoders.undo(0)
        prefix = manager.find_prefix(request)
        first_hash = request.block_hash(prefix.num_cached_blocks)
        if first_hash in room.first_hashes and not prefix.is_reserved:
            # A request of this step computes that block: once it is started, the block can be found.
            self._start(room)
            prefix = manager.find_prefix(request)
            first_hash = request.block_hash(prefix.num_cached_blocks)
        num_external = 0
        if transfers is not None:
            match = transfers.match(request, prefix)
            if match is None:
                if not request.is_finished:
                    self._queue.set_aside(Obstacle.CONNECTOR)
                return None
            if match.is_async:
                is_loading = self._load(transfers, request, prefix, match.num_tokens)
                return None if is_loading else AdmissionEnd.BLOCKS
            num_external = match.num_tokens
        num_computed = prefix.num_tokens + num_external
        granted = wanted = request.num_tokens - num_computed
        if wanted > room.budget or wanted > room.share:
            granted = self._first_chunk(wanted, room.budget, room.share)
        end_if_none = AdmissionEnd.TOKENS
        if request.encoder_inputs and room.encoders is not None:
            end_if_none = AdmissionEnd.ENCODERS if granted else AdmissionEnd.TOKENS
            granted = self._fit_encoder_inputs(room, room.encoders, request, num_computed, granted)
            if request.is_finished:
                return None
        if not granted:
            return end_if_none
        is_partial = granted < wanted
        is_long = is_partial and limits.is_long(request.num_tokens)
        if is_partial and limits.are_at_limit(room.num_partial):
            return AdmissionEnd.PARTIAL_PREFILLS
        if is_long and limits.are_long_at_limit(room.num_long):
            self._queue.set_aside(Obstacle.LONG_PREFILLS)
            return None
        num_tokens = num_computed + granted
        if self._num_lookahead_tokens:
            num_tokens = self._with_lookahead(request, num_tokens)
        claim = manager.claim(request, prefix, num_tokens)
        if claim is None:
            if room.starts:
                # To start requests takes free blocks, perhaps some of this prefix: it is looked up again.
                self._start(room)
                return None
            claim = self._claim(request, prefix, num_tokens)
            if claim is None:
                return AdmissionEnd.BLOCKS
        if transfers is not None:
            manager.fulfil([claim])
            if num_external and not transfers.allocated(request, claim.tables[0], num_external):
                return None
        if request.num_reserved_tokens:
            self._lifecycle.reservations.end(request)
        self._queue.pop()
        room.starts.append(Start(claim, num_external, granted))
        room.admitted.granted.append(granted)
        room.admitted.samples.append(not is_partial)
        if first_hash is not None:
            room.first_hashes.add(first_hash)
        if self._starts_singly or room.encoders is not None or request.lora_name:
            self._start(room)
            if room.encoders is not None:
                self._encoders.carry_out(room.encoders)
            if num_external:
                room.admitted.loading.append(Tenure(request, request.num_admissions))
        room.budget -= granted
        room.num_sent += request.num_tokens
        room.num_partial += is_partial
        room.num_long += is_long
        return None

    def _fit_encoder_inputs(
        self, room: _Room, encoders: EncoderPlan, request: Request, num_computed: int, granted: int
    ) -> int:
        """How many tokens a request gets with its encoder inputs; 0, too, if it fails for want of them."""
        most = num_computed + (room.budget if granted else 0)
        end = self._encoders.fit(encoders, request, num_computed, num_computed + granted, most)
        if encoders.failed:
            self._lifecycle.fail_all(encoders.failed)
            encoders.failed.clear()
            return 0
        is_whole = end == request.num_tokens
        return end - num_computed if is_whole or self._config.enable_chunked_prefill else 0

    def _start(self, room: _Room) -> None:
        """Start the requests that have been admitted and not started yet."""
        if room.starts:
            room.admitted.requests.extend(self._lifecycle.start(room.starts, room.now))
            room.starts.clear()
            room.first_hashes.clear()

    def _with_lookahead(self, request: Request, num_tokens: int) -> int:
        """How many tokens a request needs blocks for while it computes up to `num_tokens`."""
        most = request.num_prompt_tokens + self._lifecycle.max_output_tokens(request) - 1
        return min(num_tokens + self._num_lookahead_tokens, most)

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
        """A claim of the first request of the queue. None if there are too few blocks, which is remembered."""
        manager = self._manager
        while (claim := manager.claim(request, prefix, num_tokens)) is None:
            # No running request will make room, so waiting ones that hold blocks must.
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
