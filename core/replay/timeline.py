"""Explain in words what happened to one request and why it waited (`engine replay --why`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from ...protocol.config import SchedulingPolicy
from ...protocol.errors import counted
from ...protocol.messages import EventKind, FinishReason, RequestEvent
from ..scheduler.queues.admission_stop import AdmissionStop
from ..scheduler.queues.request_queue import WaitReason
from ..scheduler.scheduler import Scheduler
from ..scheduler.step_rows import StepRows
from ..state.request import Request, RequestKey, RequestStatus
from .dump import Dump
from .events import AddRequest, Call, Schedule
from .replayer import Moment, Replayer
from .step_timeline import StepTimeline, TimedStep

MAX_CHUNKS_SHOWN: Final = 8
MAX_OVERTAKERS_SHOWN: Final = 3

COMPILING: Final = "its grammar was being compiled"
MASKING: Final = "the mask of its next token was being computed"
GROWING: Final = "the next part of its audio had not arrived"
LOADING: Final = "its KV cache was being loaded"
IN_FLIGHT: Final = "its tokens in flight had not arrived"
NEXT_STEP: Final = "until the next step was scheduled"
IN_QUEUE: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_PREEMPTED: Final = (
    RequestStatus.PREEMPTED,
    RequestStatus.PREEMPTED_IN_FLIGHT,
    RequestStatus.WAITING_FOR_GRAMMAR,
    RequestStatus.WAITING_FOR_INPUT,
)
"""Statuses that a request can have right after it was preempted."""

REASONS: Final[dict[WaitReason | AdmissionStop, str]] = {
    AdmissionStop.NONE_LEFT: "it came after the step was planned",
    AdmissionStop.PREEMPTION: "no admission in a step that preempts",
    AdmissionStop.TOKENS_IN_FLIGHT: "a preempted request ahead of it had tokens in flight",
    AdmissionStop.SEQUENCES: "max_num_seqs requests were running",
    AdmissionStop.TOKENS: "the step was full: max_num_batched_tokens",
    AdmissionStop.MESSAGE: "the step was full: the message to the workers had its maximum size",
    AdmissionStop.ISOLATION: "a request suspected of having killed a worker ran alone",
    AdmissionStop.ENCODERS: "the encoder budget of the step or the encoder cache was used up",
    AdmissionStop.BLOCKS: "the next in the queue did not fit into the free KV-cache blocks",
    AdmissionStop.DELAY: "delayed by scheduler_delay_factor",
    AdmissionStop.PARTIAL_PREFILLS: "max_num_partial_prefills prompts were being computed",
    WaitReason.LONG_PREFILLS: "max_long_partial_prefills other long prompts were being computed",
    WaitReason.LORA_SLOTS: "requests of max_loras other adapters were running",
    WaitReason.LORA_TURN: "the next slot for an adapter was kept for a request that had waited longer",
    WaitReason.LORA_LOADING: "the workers were loading its adapter",
    WaitReason.CONNECTOR: "the KV connector did not know yet what it can load",
    WaitReason.TENANT: "max_num_seqs_per_tenant requests of its tenant were running",
}


WHY_FIRST: Final = {
    SchedulingPolicy.FCFS: "they could start when it could not",
    SchedulingPolicy.PRIORITY: "the priority policy puts smaller values first",
    SchedulingPolicy.FAIR: "the fair policy puts tenants first that were served less",
    SchedulingPolicy.DEADLINE: "the deadline policy puts earlier deadlines first",
}
"""The reason for which each policy admits a request before one that arrived earlier."""


def find_requests(dump: Dump, name: str) -> list[RequestKey]:
    """Return the keys of the requests with this name: a client's request id, a prefix of one, or "client/index"."""
    ids: dict[RequestKey, str] = {}
    for segment in dump.segments:
        if segment.snapshot is not None:
            alive = Replayer(dump.setup, segment).scheduler.requests
            ids |= {key: request.request_id for key, request in alive.items()}
        for event in segment.events:
            if isinstance(event, AddRequest):
                ids[event.client_index, event.message.request_index] = event.message.request_id
    return [
        (client_index, request_index)
        for (client_index, request_index), request_id in ids.items()
        if name == f"{client_index}/{request_index}" or (name and request_id.startswith(name))
    ]


class RequestTimeline:
    """Follows one request through a replay, and describes it in text.

    `lines` describe the events so far, one per line. `summary` says how the request's time was spent.
    """

    def __init__(self, key: RequestKey, policy: SchedulingPolicy) -> None:
        self.key = key
        self.lines: list[str] = []
        self._start: float | None = None
        self._now = 0.0
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._waiting_since: float | None = None
        self._cause = ""
        self._request: Request | None = None
        self._was_running = False
        self._policy = policy
        self._steps = StepTimeline()
        self._steps_at_arrival: list[TimedStep] = []
        self._overtakers: list[RequestKey] = []
        self._overtakers_while_blocked: list[RequestKey] = []
        self._chunks: list[tuple[int, TimedStep]] = []
        self._num_decodes = 0
        self._decoding_since = 0.0
        self._num_beside = 0
        self._num_skipped = 0
        self._total_waits: defaultdict[str, float] = defaultdict(float)
        self._running_s = 0.0
        self._is_over = False
        self._running_since = self._last_look = self._end = 0.0

    def begin(self, scheduler: Scheduler) -> None:
        """Start with a segment, with the scheduler in the initial state of the segment."""
        self._rows = StepRows(scheduler.last_slots)
        self._steps = StepTimeline()
        self._request = scheduler.requests.get(self.key)
        self._was_running = self._is_running()
        if self._request is not None and self._start is None:
            self._start = self._request.queued_at
            self._add_line(self._start, "queued, before the log begins")
            self._waiting_since = None if self._was_running else self._start
            self._cause = "what was before the log"

    def apply_moment(self, moment: Moment, scheduler: Scheduler) -> None:
        """Process a replayed event, with the scheduler in the state after it."""
        event = moment.event
        counts: list[int] | None = None
        if moment.step is not None:
            counts = self._rows.read(moment.step).tolist()
        timed = self._steps.apply_moment(moment, counts)
        if self._is_over:
            return
        now = getattr(event, "now", None)
        self._now = self._end = self._now if now is None else now
        if isinstance(event, AddRequest):
            self._record_arrival(event, scheduler)
        if self._request is None:
            return
        if self._was_running and self._request.status in _PREEMPTED:
            self._record_preemption(event, scheduler)
        if isinstance(event, Schedule) and not self._request.is_finished:
            self._record_step(scheduler, moment, timed, counts)
        for first_token in self._first_tokens(moment):
            self._record_first_token(first_token)
        if self._request.is_finished:
            self._record_end(self._why_ended(event))
        self._was_running = self._is_running()

    def finish(self) -> None:
        """Close the timeline at the end of the replay."""
        if self._request is not None and not self._is_over:
            self._close_wait()
            self._close_steps()
            self._add_line(
                self._now, f"still {self._request.status.name.lower()} where the log ends"
            )

    def summary(self) -> str:
        """Return one line that divides the request's time into running and waiting, by cause."""
        if self._start is None:
            return "the request is not in the log"
        total = self._end - self._start
        parts = [f"{self._running_s:.3f} s running"]
        parts += [f"{s:.3f} s: {cause}" for cause, s in _largest_first(self._total_waits)]
        return f"{total:.3f} s in total; " + "; ".join(parts)

    def _record_arrival(self, event: AddRequest, scheduler: Scheduler) -> None:
        if (event.client_index, event.message.request_index) != self.key:
            return
        self._request = scheduler.requests.get(self.key)
        self._start = self._waiting_since = self._last_look = event.now
        self._cause = NEXT_STEP
        self._steps_at_arrival = list(self._steps.in_flight)
        message = event.message
        limit = message.sampling_params.max_tokens
        tenant = f", tenant {message.tenant}" if message.tenant else ""
        num_running, num_waiting = scheduler.get_request_counts()
        self._add_line(
            event.now,
            f"queued: {counted(event.num_prompt_bytes // 4, 'prompt token')}, at most {limit} to generate, priority "
            f"{message.priority}{tenant}; {num_running} running, {max(0, num_waiting - 1)} others waiting",
        )
        if self._request is None:
            self._add_line(event.now, "rejected")
            self._is_over = True

    def _record_step(
        self,
        scheduler: Scheduler,
        moment: Moment,
        timed: TimedStep | None,
        counts: list[int] | None,
    ) -> None:
        request = self._request
        assert request is not None
        if not self._is_running():
            self._wait(scheduler)
            self._record_overtakers(scheduler, moment)
            return
        if not self._was_running:
            self._close_wait()
            slots = scheduler.slots
            cached = max(0, request.num_cached_tokens)
            again = (
                "again "
                if request.num_admissions > 1
                else f"with {counted(cached, 'token')} cached "
            )
            self._add_line(
                self._now,
                f"admitted {again}to slot {request.slot}; {slots.num_free} slots stay free",
            )
            self._running_since = self._now
            self._decoding_since = self._now
        if counts is None or timed is None:
            return
        positions = (self._rows.slots == request.slot).nonzero()[0]
        if not len(positions):
            self._num_skipped += 1
            return
        count = counts[int(positions[0])]
        num_computed = int(scheduler.slots.num_computed_tokens[request.slot])
        if num_computed - count < request.num_tokens:
            self._chunks.append((count, timed))
            self._decoding_since = self._now
        else:
            self._num_decodes += 1
            self._num_beside += len(counts) - 1

    def _wait(self, scheduler: Scheduler) -> None:
        """Add the time since the last step to the current cause of waiting, and determine the new cause."""
        assert self._request is not None
        if self._waiting_since is None:
            self._waiting_since = self._now
        elif self._cause:
            self._waits[self._cause] += self._now - self._last_look
        self._last_look = self._now
        if not self._request.is_finished:
            self._cause = _find_cause(self._request, scheduler)

    def _record_overtakers(self, scheduler: Scheduler, moment: Moment) -> None:
        """Record requests that arrived later and are in the step, while this request still waits."""
        request = self._request
        assert request is not None
        if moment.step is None or request.status not in IN_QUEUE:
            return
        is_blocked = isinstance(scheduler.why_waiting(request), WaitReason)
        for data in moment.step.new_requests:
            other = scheduler.requests.get(data.request_id)
            if other is not None and other.arrival > request.arrival:
                (self._overtakers_while_blocked if is_blocked else self._overtakers).append(
                    data.request_id
                )

    def _close_wait(self) -> None:
        if self._waiting_since is None:
            return
        waited = self._now - self._waiting_since
        known = sum(self._waits.values())
        if self._cause and waited > known:
            self._waits[self._cause] += waited - known
        if waited > 0:
            causes = [
                f"{s:.3f} s {cause}" + (self._describe_steps() if cause is NEXT_STEP else "")
                for cause, s in _largest_first(self._waits)
                if s > 0
            ]
            self._add_line(
                self._waiting_since,
                f"waited {waited:.3f} s: " + "; ".join(causes),
            )
        for keys, why in (
            (self._overtakers, WHY_FIRST[self._policy]),
            (self._overtakers_while_blocked, "requests behind one that is set aside may pass it"),
        ):
            if keys:
                self._add_line(self._now, f"overtaken by {_name_keys(keys)} that came later: {why}")
                keys.clear()
        for cause, seconds in self._waits.items():
            self._total_waits[cause] += seconds
        self._waits.clear()
        self._waiting_since, self._cause = None, ""

    def _describe_steps(self) -> str:
        """Describe the steps in flight when the request arrived. The next step is scheduled when one of them ends."""
        steps = self._steps_at_arrival
        done = [(step.seconds, step) for step in steps if step.seconds is not None]
        if not done:
            return ""
        seconds, slowest = max(done, key=lambda each: each[0])
        return (
            f" ({len(steps)} in flight, the slowest {seconds:.3f} s long with {counted(slowest.num_tokens, 'token')} "
            f"of {counted(slowest.num_sequences, 'request')})"
        )

    def _record_preemption(self, event: object, scheduler: Scheduler) -> None:
        self._close_steps()
        why = "no KV-cache blocks were free"
        if isinstance(event, Call) and event.method == "reset_prefix_cache":
            why = "the prefix cache was reset"
        elif (
            isinstance(event, Schedule) and scheduler.admission_stop is not AdmissionStop.PREEMPTION
        ):
            why = "a request of higher priority took its place"
        assert self._request is not None
        self._add_line(
            self._now,
            f"preempted with {counted(self._request.num_tokens, 'token')}: {why}",
        )
        self._waiting_since = self._last_look = self._now
        self._was_running = False

    def _record_first_token(self, event: RequestEvent) -> None:
        self._close_chunks()
        assert self._start is not None
        after = event.timestamp - self._start
        self._add_line(event.timestamp, f"first token, {after:.3f} s after its arrival")
        self._decoding_since = event.timestamp

    def _record_end(self, reason: str) -> None:
        self._close_wait()
        self._close_steps()
        self._add_line(self._now, f"ended: {reason}")
        self._is_over = True

    def _close_chunks(self) -> None:
        if self._chunks:
            shown = ", ".join(
                f"{count}/{step.num_tokens} in "
                + ("flight" if step.seconds is None else f"{1e3 * step.seconds:.1f} ms")
                for count, step in self._chunks[:MAX_CHUNKS_SHOWN]
            )
            more = " …" if len(self._chunks) > MAX_CHUNKS_SHOWN else ""
            self._add_line(
                self._now,
                f"computed its prompt in {counted(len(self._chunks), 'step')}; its tokens/all tokens: {shown}{more}",
            )
            self._chunks = []

    def _close_steps(self) -> None:
        """Add lines that summarize the steps since the last line."""
        self._close_chunks()
        if self._num_decodes:
            beside = self._num_beside / self._num_decodes
            milliseconds = 1e3 * (self._now - self._decoding_since) / self._num_decodes
            self._add_line(
                self._now,
                f"{counted(self._num_decodes, 'decode step')}, {milliseconds:.1f} ms each, "
                f"with {beside:.1f} other requests on average",
            )
        if self._num_skipped:
            self._add_line(self._now, f"not scheduled in {counted(self._num_skipped, 'step')}")
        if self._was_running:
            self._running_s += self._now - self._running_since
            self._running_since = self._now
        self._num_decodes = self._num_beside = self._num_skipped = 0
        self._decoding_since = self._now

    def _why_ended(self, event: object) -> str:
        request = self._request
        assert request is not None
        if isinstance(event, Call) and event.method.startswith("finish"):
            return "aborted by the client or its frontend"
        reason = FinishReason(request.status - RequestStatus.FINISHED_STOPPED)
        if reason is not FinishReason.EXPIRED:
            return str(reason)
        assert self._start is not None
        did = "was running" if self._was_running else "waited"
        after = max(request.deadline - self._start, 0.0)
        return f"{reason}, its deadline passed {after:.3f} s after its arrival, while it {did}"

    def _first_tokens(self, moment: Moment) -> Iterator[RequestEvent]:
        client_index, request_index = self.key
        message = (moment.outputs or {}).get(client_index)
        if message is None:
            return
        for events in message.events:
            if events.kind is EventKind.FIRST_TOKEN:
                for event in events.split():
                    if event.request_index == request_index:
                        yield event

    def _is_running(self) -> bool:
        return self._request is not None and self._request.status is RequestStatus.RUNNING

    def _add_line(self, at: float, text: str) -> None:
        assert self._start is not None
        self.lines.append(f"{at - self._start:10.3f} s  {text}")


def _find_cause(request: Request, scheduler: Scheduler) -> str:
    """Return why a waiting request is not in the last step."""
    if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
        return MASKING if request.awaits_mask else COMPILING
    if request.status is RequestStatus.WAITING_FOR_INPUT:
        return GROWING
    if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
        return LOADING
    if request.status is RequestStatus.PREEMPTED_IN_FLIGHT:
        return IN_FLIGHT
    return REASONS[scheduler.why_waiting(request)]


def _name_keys(keys: list[RequestKey]) -> str:
    """Return text with the number of requests and the names of the first few."""
    names = ", ".join(f"{client}/{index}" for client, index in keys[:MAX_OVERTAKERS_SHOWN])
    more = ", …" if len(keys) > MAX_OVERTAKERS_SHOWN else ""
    return f"{counted(len(keys), 'request')} ({names}{more})"


def _largest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])
