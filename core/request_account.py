"""What happened to one request, and why it waited, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from ..protocol.messages import EventKind, FinishedRequest, RequestEvent
from .admission_end import AdmissionEnd
from .event_dump import Dump
from .events import AddRequest, FinishClient, FinishRequests, ResetPrefixCache, Schedule
from .replayer import Moment, Replayer
from .request import Request, RequestKey, RequestStatus
from .request_queue import Obstacle
from .scheduler import Scheduler
from .step_rows import StepRows

COMPILING: Final = "its grammar was being compiled"
LOADING: Final = "its KV cache was being loaded"
NEXT_STEP: Final = "no step was scheduled yet"
REASONS: Final[dict[Obstacle | AdmissionEnd, str]] = {
    AdmissionEnd.NONE_LEFT: "it came after the step was planned",
    AdmissionEnd.PREEMPTION: "no admission in a step that preempts",
    AdmissionEnd.SEQUENCES: "max_num_seqs requests were running",
    AdmissionEnd.TOKENS: "the step was full: max_num_batched_tokens",
    AdmissionEnd.MESSAGE: "the step was full: as many tokens as go to the workers at once",
    AdmissionEnd.QUARANTINE: "a suspect of having killed a worker is tried alone",
    AdmissionEnd.ENCODERS: "the encoder budget of the step or the encoder cache was used up",
    AdmissionEnd.BLOCKS: "the next in the queue did not fit into the free KV-cache blocks",
    AdmissionEnd.DELAY: "held back by scheduler_delay_factor",
    AdmissionEnd.PARTIAL_PREFILLS: "max_num_partial_prefills prompts were being computed",
    Obstacle.LONG_PREFILLS: "max_long_partial_prefills other long prompts were being computed",
    Obstacle.LORA_SLOTS: "requests of max_loras other adapters were running",
    Obstacle.LORA_TURN: "the next slot for an adapter was kept for a request that had waited longer",
    Obstacle.CONNECTOR: "the KV connector did not know yet what it can load",
    Obstacle.TENANT: "max_num_seqs_per_tenant requests of its tenant were running",
}


def find_requests(dump: Dump, name: str) -> list[RequestKey]:
    """The requests called `name`: what clients know them by, its beginning, or "client/index"."""
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


class RequestAccount:
    """Watches a replay moment by moment; `lines` tell the story so far, `summary` where the time went."""

    def __init__(self, key: RequestKey) -> None:
        self.key = key
        self.lines: list[str] = []
        self._start: float | None = None
        self._now = 0.0
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._waiting_since: float | None = None
        self._cause = ""
        self._request: Request | None = None
        self._was_running = False
        self._chunks: list[str] = []
        self._num_decodes = 0
        self._decoding_since = 0.0
        self._num_beside = 0
        self._num_skipped = 0
        self._total_waits: defaultdict[str, float] = defaultdict(float)
        self._running_s = 0.0
        self._is_over = False
        self._running_since = self._last_look = self._end = 0.0

    def begin(self, scheduler: Scheduler) -> None:
        """A replay begins, with the state that a segment begins with."""
        self._rows = StepRows(scheduler.last_slots)
        self._request = scheduler.requests.get(self.key)
        self._was_running = self._is_running()
        if self._request is not None and self._start is None:
            self._start = self._request.queued_at
            self._say(self._start, "queued, before the log begins")
            self._waiting_since = None if self._was_running else self._start
            self._cause = "what was before the log"

    def watch(self, moment: Moment, scheduler: Scheduler) -> None:
        event = moment.event
        counts = None
        if moment.step is not None:
            counts = self._rows.read(moment.step)
        if self._is_over:
            return
        self._now = self._end = getattr(event, "now", self._now)
        if isinstance(event, AddRequest):
            self._see_arrival(event, scheduler)
        if self._request is None:
            return
        if self._was_running and self._request.status is RequestStatus.PREEMPTED:
            self._see_preemption(event, scheduler)
        if isinstance(event, Schedule):
            self._see_step(scheduler, None if counts is None else counts.tolist())
        if isinstance(event, FinishRequests | FinishClient) and self._request.is_finished:
            self._see_end("by the client or its frontend")
        for finished, happened in self._heard(moment):
            if isinstance(happened, RequestEvent):
                self._see_first_token(happened)
            elif finished is not None and not self._is_over:
                self._see_end(str(finished.reason))
        self._was_running = self._is_running()

    def finish(self) -> None:
        """The replay is over."""
        if self._request is not None and not self._is_over:
            self._close_wait()
            self._close_steps()
            self._say(self._now, f"still {self._request.status.name.lower()} where the log ends")

    def summary(self) -> str:
        if self._start is None:
            return "the request is not in the log"
        total = self._end - self._start
        parts = [f"{self._running_s:.3f} s running"]
        parts += [f"{s:.3f} s: {cause}" for cause, s in _largest_first(self._total_waits)]
        return f"{total:.3f} s in all; " + "; ".join(parts)

    def _see_arrival(self, event: AddRequest, scheduler: Scheduler) -> None:
        if (event.client_index, event.message.request_index) != self.key:
            return
        self._request = scheduler.requests.get(self.key)
        self._start = self._waiting_since = self._last_look = event.now
        self._cause = NEXT_STEP
        message = event.message
        limit = message.sampling_params.max_tokens
        tenant = f", tenant {message.tenant}" if message.tenant else ""
        num_running, num_waiting = scheduler.get_request_counts()
        self._say(
            event.now,
            f"queued: {event.num_prompt_bytes // 4} prompt tokens, at most {limit} to generate, priority "
            f"{message.priority}{tenant}; {num_running} running, {max(0, num_waiting - 1)} others waiting",
        )
        if self._request is None:
            self._say(event.now, "refused")
            self._is_over = True

    def _see_step(self, scheduler: Scheduler, counts: list[int] | None) -> None:
        request = self._request
        assert request is not None
        if not self._is_running():
            self._wait(scheduler)
            return
        if not self._was_running:
            self._close_wait()
            slots = scheduler.slots
            cached = max(0, request.num_cached_tokens)
            again = "again " if request.num_admissions > 1 else f"with {cached} tokens cached "
            self._say(
                self._now,
                f"admitted {again}to slot {request.slot}; {slots.num_free} slots stay free",
            )
            self._running_since = self._now
            self._decoding_since = self._now
        if counts is None:
            return
        positions = (self._rows.slots == request.slot).nonzero()[0]
        if not len(positions):
            self._num_skipped += 1
            return
        count = counts[int(positions[0])]
        num_computed = int(scheduler.slots.num_computed_tokens[request.slot])
        if num_computed - count < request.num_tokens:
            self._chunks.append(f"{count}/{sum(counts)}")
            self._decoding_since = self._now
        else:
            self._num_decodes += 1
            self._num_beside += len(counts) - 1

    def _wait(self, scheduler: Scheduler) -> None:
        """Charge the time since the last step to its cause, and find the new one."""
        assert self._request is not None
        if self._waiting_since is None:
            self._waiting_since = self._now
        elif self._cause:
            self._waits[self._cause] += self._now - self._last_look
        self._last_look = self._now
        if not self._request.is_finished:
            self._cause = _find_cause(self._request, scheduler)

    def _close_wait(self) -> None:
        if self._waiting_since is None:
            return
        waited = self._now - self._waiting_since
        known = sum(self._waits.values())
        if self._cause and waited > known:
            self._waits[self._cause] += waited - known
        if waited > 0:
            causes = [f"{s:.3f} s {cause}" for cause, s in _largest_first(self._waits) if s > 0]
            self._say(
                self._waiting_since,
                f"waited {waited:.3f} s: " + "; ".join(causes),
            )
        for cause, seconds in self._waits.items():
            self._total_waits[cause] += seconds
        self._waits.clear()
        self._waiting_since, self._cause = None, ""

    def _see_preemption(self, event: object, scheduler: Scheduler) -> None:
        self._close_steps()
        why = "it was the one to give way: blocks were lacking"
        if isinstance(event, ResetPrefixCache):
            why = "the prefix cache was reset"
        elif isinstance(event, Schedule) and scheduler.admission_end is not AdmissionEnd.PREEMPTION:
            why = "a request of higher priority took its place"
        assert self._request is not None
        self._say(
            self._now,
            f"preempted with {self._request.num_tokens} tokens: {why}",
        )
        self._waiting_since = self._last_look = self._now
        self._was_running = False

    def _see_first_token(self, event: RequestEvent) -> None:
        self._close_chunks()
        assert self._start is not None
        after = event.timestamp - self._start
        self._say(event.timestamp, f"first token, {after:.3f} s after its arrival")
        self._decoding_since = event.timestamp

    def _see_end(self, reason: str) -> None:
        self._close_wait()
        self._close_steps()
        self._say(self._now, f"ended: {reason}")
        self._is_over = True

    def _close_chunks(self) -> None:
        if self._chunks:
            shown = ", ".join(self._chunks[:8]) + (" …" if len(self._chunks) > 8 else "")
            self._say(
                self._now,
                f"computed its prompt in {len(self._chunks)} steps; tokens of it and of all: {shown}",
            )
            self._chunks = []

    def _close_steps(self) -> None:
        """Tell of the steps since the last line."""
        self._close_chunks()
        if self._num_decodes:
            beside = self._num_beside / self._num_decodes
            milliseconds = 1e3 * (self._now - self._decoding_since) / self._num_decodes
            self._say(
                self._now,
                f"{self._num_decodes} steps of one token, {milliseconds:.1f} ms each, "
                f"beside {beside:.1f} others on average",
            )
        if self._num_skipped:
            self._say(self._now, f"{self._num_skipped} steps went without it")
        if self._was_running:
            self._running_s += self._now - self._running_since
            self._running_since = self._now
        self._num_decodes = self._num_beside = self._num_skipped = 0
        self._decoding_since = self._now

    def _heard(
        self, moment: Moment
    ) -> Iterator[tuple[FinishedRequest | None, RequestEvent | None]]:
        client_index, request_index = self.key
        message = (moment.outputs or {}).get(client_index)
        if message is None:
            return
        for events in message.events:
            if events.kind is EventKind.FIRST_TOKEN:
                for event in events.split():
                    if event.request_index == request_index:
                        yield None, event
        for finished in message.finished:
            if finished.request_index == request_index:
                yield finished, None

    def _is_running(self) -> bool:
        return self._request is not None and self._request.status is RequestStatus.RUNNING

    def _say(self, at: float, text: str) -> None:
        assert self._start is not None
        self.lines.append(f"{at - self._start:10.3f} s  {text}")


def _find_cause(request: Request, scheduler: Scheduler) -> str:
    """Why a waiting request is not in the last step."""
    if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
        return COMPILING
    if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
        return LOADING
    return REASONS[scheduler.why_waiting(request)]


def _largest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])
