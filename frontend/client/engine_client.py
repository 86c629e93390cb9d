"""The HTTP layer's client of the engine: submits sequences and returns their outputs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import ChainMap
from collections.abc import Callable, Iterable
from typing import Any, Final

import zmq

from ...protocol.arrays import int32_view
from ...protocol.config import FIRST_EPOCH, EngineConfig
from ...protocol.encoder_inputs.inputs import EncoderInput
from ...protocol.errors import POISON_REQUEST, EngineError
from ...protocol.messages import CoreReady, EngineCoreOutputs, FinishReason, ReplicaLost
from ...protocol.sampling_params import StructuredOutput
from ...protocol.supervisor_messages import EngineStatus
from ..observability.metrics.metrics import Metrics
from ..observability.tracing.request_trace import begin_group
from ..supervisor.parse_journal import ParseJournal
from ..tokenizer.tokenizer import Tokenizer
from .encoder_inputs import grow_request
from .engine_watch import EngineWatch
from .executor import ThreadExecutor
from .groups.factory import GroupFactory, count_outputs
from .groups.reasoning_ends import ReasoningEnds
from .groups.recording import OutputLog, Recording
from .groups.send_window import SendWindow
from .input_processor import InputProcessor, with_constraint
from .isolation.isolation_queue import IsolationQueue
from .isolation.poison_cache import PoisonCache
from .logprobs import PositionLogprobs
from .output_processor import OutputProcessor
from .prompt_hashes import hash_prompts
from .replicas.core_connection import CoreConnection, CoreEvents
from .replicas.core_load import Overloaded
from .replicas.moves import ReplicaMoves
from .replicas.remote_prefill import RemotePrefill
from .replicas.replica_calls import ReplicaCalls
from .replicas.replica_sleep import ReplicaSleep
from .replicas.routing import ReplicaUnavailable, Router
from .request_group import RequestGroup, Sequence
from .request_indices import RequestIndices
from .sequence_io import Delta, SequenceRequest, is_accepted

logger = logging.getLogger(__name__)

__all__ = [
    "BeginRecording",
    "Delta",
    "EngineClient",
    "EngineDead",
    "EngineDraining",
    "Overloaded",
    "PositionLogprobs",
    "ReplicaUnavailable",
    "RequestGroup",
    "Sequence",
    "SequenceRequest",
]

ENDED_AT_ONCE: Final = 128
"""Maximum number of a request's sequences that are aborted at once, before other tasks run."""

DEADLINE_GRACE_S: Final = 0.25
"""Seconds after a deadline at which the frontend ends the request. The core, which usually does, gives more details."""

MAX_SILENT_CRASHES: Final = 3
"""Maximum silent core crashes that a sequence survives. It fails at the next one."""

BeginRecording = Callable[[RequestGroup], Recording]


class EngineDraining(EngineError):
    """Raised for new requests while the server shuts down."""


class EngineDead(EngineError):
    """Raised after the engine has failed; the message is the reason."""


class EngineClient:
    """One frontend's connection to all cores.

    All methods must be called on the event loop that ran `start`.

    Attributes:
        draining: True if the server shuts down. The server sets it.
        dead_reason: The reason why the engine failed; None if it did not.
        executor: The thread executor, which the HTTP server shares.
        client_index: The number of this frontend.
        cores: The connection to each core.
        groups: Makes the groups of requests.
        sleep: Puts the replicas to sleep, and wakes them.
        finish_sequence: Finishes a sequence that was not sent to a core.
        finish_as_reported: Finishes a sequence that was not sent to a core, in the way that its earlier core reported.
        resume_outputs: Continues to wake the readers of outputs after a callback has failed.
        list_recent_requests: Returns the times and counts of running and recently ended requests.
        reasoning_ends: The running answers whose reasoning clients may end.
        output_log: Records outputs before they are applied; None to apply them immediately.
    """

    def __init__(
        self,
        config: EngineConfig,
        client_index: int,
        tokenizer: Tokenizer,
        journal: ParseJournal | None = None,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        self.draining = False
        self.dead_reason: str | None = None
        self.metrics = Metrics(config, client_index)
        self._config = config
        self.client_index = client_index
        self._tokenizer = tokenizer
        self.executor = ThreadExecutor(journal)
        self._input = InputProcessor(config, tokenizer, self.executor)
        self._window = SendWindow(
            config, lambda sequence: self._prefill.send(sequence, self.cores[sequence.core_index])
        )
        self._output = OutputProcessor(self.metrics, self._abort_at_core, self._window.record_end)
        self.list_recent_requests = self._output.list_recent_requests
        self.finish_sequence = self._output.finish
        self.resume_outputs = self._output.resume
        self.finish_as_reported = self._output.finish_as_reported
        self.groups = GroupFactory(config, tokenizer, self._input, self._output.wake_soon)
        self._context: zmq.Context[Any] = context or zmq.Context.instance()
        self.cores: list[CoreConnection] = []
        self._router = router = Router(self.cores, self.metrics, config.scheduler.max_num_seqs)
        sequences = self._output.sequences
        self._prefill = RemotePrefill(
            config, client_index, sequences, router, lambda: self._indices.next_free(), self._send
        )
        self._indices = RequestIndices(ChainMap[int, Any](sequences, self._prefill.prefills))
        self._moves = ReplicaMoves(
            config,
            self.cores,
            sequences,
            self._move,
            self._prefill.begin_fetch,
            lambda: () if self.watch is None else self.watch.find_stuck_replicas(),
        )
        self.calls = ReplicaCalls(self._live_cores)
        self.sleep = ReplicaSleep(self.cores, self._check_alive, lambda: self.watch)
        self.reasoning_ends = ReasoningEnds()
        self._isolation_queue: list[IsolationQueue] = []
        self._poison_cache = PoisonCache()
        self.watch: EngineWatch | None = None
        self.output_log: OutputLog | None = None
        self.metrics.watch_replicas(lambda rank: self.watch is not None and self.watch.is_up(rank))
        self._started: asyncio.Future[None] | None = None

    @property
    def ready(self) -> bool:
        """True if some core accepts requests."""
        return self.dead_reason is None and any(self._router.open_cores())

    @property
    def num_inflight(self) -> int:
        """The number of unfinished sequences."""
        return len(self._output.sequences)

    def find_overload(self) -> Overloaded | None:
        """Return the overload of a full replica if no serving replica has room for another request, else None."""
        return self._router.find_overload()

    def has_idle_slots(self, share: float) -> bool:
        """Return whether a replica without waiting sequences uses less than this share of its slots."""
        limit = self._config.scheduler.max_num_seqs * share
        loads = (core.load for core in self._router.open_cores())
        return any(not load.num_queued and load.total < limit for load in loads)

    async def start(self) -> None:
        """Connect, and wait until every core can execute requests.

        A restarted frontend waits for only one core, and for none while all replicas sleep.

        Raises:
            EngineDead: The engine failed before that.
        """
        self._started = asyncio.get_running_loop().create_future()
        self.watch = EngineWatch(self._context, self._config, self._apply_status)
        events = CoreEvents(
            on_ready=self._handle_ready_core,
            on_outputs=self._receive_outputs,
            on_lost_outputs=self._handle_lost_outputs,
            on_replica_lost=self._handle_lost_replica,
            on_unsent_request=self._fail_request,
            on_end_reasoning=self.reasoning_ends.answer_call,
            on_refused=self.fail,
        )
        for core_index in range(self._config.parallel.data_parallel_size):
            core = CoreConnection(
                self._context, self._config, self.client_index, core_index, events
            )
            self.cores.append(core)
            self._isolation_queue.append(IsolationQueue(self._send))
            self.metrics.watch_dropped_frames(core_index, core.num_dropped_frames)
        watch = self.watch
        self.metrics.watch_status(lambda: watch.status)
        self._moves.start()
        await self._started

    def close(self) -> None:
        """Disconnect from the cores. Unfinished groups fail."""
        if self.dead_reason is None:
            self.fail("the server stopped before this request finished")
        self._moves.close()
        while self.cores:
            self._isolation_queue.pop().close()
            self.cores.pop().close()
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        self.executor.close()

    def fail(self, reason: str) -> None:
        """Record that the engine failed: fail all unfinished requests and reject new ones."""
        if self.dead_reason is not None:
            return
        self.dead_reason = reason
        if self.output_log is not None:
            # With a store, the next server continues the recorded requests, so they must not end here.
            self.output_log.close()
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineDead(reason))
        self._output.fail_sequences(self._output.sequences.values(), reason)
        for core in self.cores:
            core.fail_calls(EngineDead(reason))

    async def submit(
        self,
        sequences: list[SequenceRequest],
        *,
        request_id: str,
        begin_recording: BeginRecording | None = None,
    ) -> RequestGroup:
        """Send sequences to the cores. If this raises, none was sent.

        Sequences of one prompt (the same object) share a core. `begin_recording` is called with the group before
        anything is sent, and returns its recording. It may finish sequences, which are then not sent.

        Raises:
            ParameterError: A parameter is invalid for this model.
            Overloaded: The queue is full.
            ReplicaUnavailable: The requested replica accepts no requests at the moment.
            EngineDraining: The server is shutting down, and did not accept this work before.
            EngineDead: The engine has failed.
        """
        self._check_open()
        requests = await self._input.process(sequences, time.monotonic())
        await hash_prompts(sequences, requests, self._config.cache)
        self._check_open()
        for asked, request in zip(sequences, requests, strict=True):
            request.request_id = asked.request_id or request_id
        requests[0].delivery_times = self._output.take_delivery_times()
        started = await self.groups.new_sequences(sequences, requests)
        is_poison = any(request in self._poison_cache for request in requests)
        cores = await self._router.route(sequences, requests)
        self._check_open()
        num_outputs = count_outputs(sequences)
        group = self.groups.new_group(request_id, started, num_outputs, self._abort_group)
        for asked, sequence, core in zip(sequences, started, cores, strict=True):
            sequence.is_pinned = asked.data_parallel_rank is not None
            self._register(sequence, core)
        if begin_recording is not None:
            group.recording = begin_recording(group)
        group.trace = begin_group()
        if not is_poison:
            self._window.send_group(group)
        self._watch_deadline(group, sequences[0].deadline)
        if is_poison:
            # No core has received this group.
            self._end_group(group, FinishReason.ERROR, POISON_REQUEST)
        return group

    def append_inputs(
        self, sequence: Sequence, inputs: Iterable[EncoderInput], *, is_last: bool
    ) -> None:
        """Append encoder inputs to an open sequence, unless it has finished.

        After the last inputs, the output ends with the tokens that they cover.
        """
        if sequence.finished:
            return
        message = grow_request(sequence.request, list(inputs), is_last=is_last)
        self.cores[sequence.core_index].append_inputs(sequence.request, message)

    def constrain(self, sequence: Sequence, constraint: StructuredOutput) -> None:
        """Continue a sequence with another constraint, which must accept the tokens that the sequence has."""
        self._isolation_queue[sequence.core_index].remove_sequence(sequence)
        self._abort_at_core(sequence)
        sequence.request = with_constraint(sequence.request, constraint)
        self._resubmit(sequence, None)

    def _live_cores(self) -> list[CoreConnection]:
        self._check_alive()
        return self.cores

    def _check_alive(self) -> None:
        if self.dead_reason is not None:
            raise EngineDead(self.dead_reason)
        if not self.cores:
            raise EngineDead("the engine client is not started; call start() first")

    def _check_open(self) -> None:
        self._check_alive()
        if self.draining and not is_accepted.get():
            self.metrics.record_rejection(0, "draining")
            raise EngineDraining(
                "the server is shutting down and accepts no new requests; retry after it has restarted"
            )

    def _register(self, sequence: Sequence, core: CoreConnection) -> None:
        """Assign a sequence to a core and count it as unfinished."""
        request = sequence.request
        request.request_index = self._indices.next_free()
        keys = self._router.keys(request)
        sequence.assign(core.core_index, core.load, keys)
        self._output.sequences[request.request_index] = sequence
        core.load.record_submitted(sequence.num_prompt_tokens, keys)
        self.sleep.wake_for_request(core)

    def _send(self, sequence: Sequence) -> None:
        """Send a sequence to its core; if the core is not ready, it is sent after the core's next greeting."""
        core = self.cores[sequence.core_index]
        sequence.epoch = core.epoch if core.ready else 0
        core.add_request(sequence.request)

    def _abort_group(self, group: RequestGroup) -> None:
        """Abort the first sequences of a group now, and the rest in later callbacks if there are many."""

        def abort(sequence: Sequence) -> None:
            self._output.finish(sequence, FinishReason.ABORT)
            self._abort_at_core(sequence)

        self._window.drop_group(group)
        self._end_in_turns(group, abort)

    def _end_in_turns(self, group: RequestGroup, end: Callable[[Sequence], None]) -> None:
        num_ended = 0
        for sequence in group.sequences:
            if sequence.finished:
                continue
            if num_ended == ENDED_AT_ONCE:
                asyncio.get_running_loop().call_soon(self._end_in_turns, group, end)
                return
            end(sequence)
            num_ended += 1

    def _end_group(
        self, group: RequestGroup, reason: FinishReason, error: str | None = None
    ) -> None:
        for sequence in group.sequences:
            if not sequence.finished:
                self._output.finish(sequence, reason, error=error)
                self._abort_at_core(sequence)

    def _watch_deadline(self, group: RequestGroup, deadline: float) -> None:
        """Schedule the end of a group at its deadline.

        The core normally ends the requests, but only between steps, and it may be down.
        """
        if deadline:
            group.deadline_timer = asyncio.get_running_loop().call_later(
                deadline + DEADLINE_GRACE_S - time.monotonic(),
                self._end_in_turns,
                group,
                self._output.expire,
            )

    def _abort_at_core(self, sequence: Sequence) -> None:
        self._prefill.cancel(sequence)
        self.cores[sequence.core_index].abort_request(sequence.request_index)

    def _handle_ready_core(self, ready: CoreReady) -> None:
        self.metrics.record_ready(ready)
        num_frontends = self._config.parallel.api_server_count
        self._isolation_queue[ready.core_index].reset(
            (self.client_index + ready.epoch) % num_frontends
        )
        self._prefill.drop_core(ready.core_index)
        for sequence in list(self._output.sequences.values()):
            if sequence.core_index == ready.core_index and self._may_continue(sequence):
                self._resubmit(sequence, self.cores[ready.core_index].lost_time)
        if self._config.epoch != FIRST_EPOCH or all(core.ready for core in self.cores):
            self._end_start()

    def _end_start(self) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _may_continue(self, sequence: Sequence) -> bool:
        """Return whether a sequence may be resubmitted. If it has seen too many crashes, fail it."""
        if sequence.finished:
            return False
        if self.cores[sequence.core_index].exited_silently(sequence.epoch):
            sequence.suspect_after_silent_crash()
        if sequence.num_silent_crashes > MAX_SILENT_CRASHES:
            self._fail_as_poison(sequence)
        return not sequence.finished

    def _fail_as_poison(self, sequence: Sequence) -> None:
        """Fail the whole group of a sequence that caused crashes, because a response needs all sequences."""
        self._poison_cache.add_request(sequence.request)
        if self.watch is not None:
            self.watch.report_cause_found()
        self._end_group(sequence.group, FinishReason.ERROR, POISON_REQUEST)

    def _resubmit(self, sequence: Sequence, lost_time: float | None) -> None:
        self._window.remove_sequence(sequence)
        old_index = sequence.request_index
        self._output.resubmit(sequence, self._indices.next_free(), lost_time)
        if (recording := sequence.group.recording) is not None:
            recording.record_move(old_index, sequence.position)
        isolation_queue = self._isolation_queue[sequence.core_index]
        if sequence.is_silent_suspect:
            sequence.epoch = 0
            isolation_queue.add_suspect(sequence)
        else:
            self._prefill.resend(sequence, old_index, self.cores[sequence.core_index])
            isolation_queue.await_progress(sequence)

    def _receive_outputs(self, outputs: EngineCoreOutputs) -> None:
        if self.output_log is None:
            self._apply_outputs(outputs)
        else:
            self.output_log.append(outputs, self._apply_recorded_outputs)

    def _apply_recorded_outputs(self, outputs: EngineCoreOutputs) -> None:
        try:
            self._apply_outputs(outputs)
        except Exception:
            logger.exception("core %d sent invalid outputs; reconnecting", outputs.core_index)
            self.cores[outputs.core_index].reconnect()

    def _apply_outputs(self, outputs: EngineCoreOutputs) -> None:
        for done in outputs.finished:
            sequence = self._output.sequences.get(done.request_index)
            if sequence is not None and done.message == POISON_REQUEST:
                self._fail_as_poison(sequence)
        self._prefill.apply_outputs(outputs)
        self._output.process(outputs)
        self._isolation_queue[outputs.core_index].advance()

    def _apply_status(self, status: EngineStatus) -> None:
        """Apply a status of the supervisor. Move sequences away from cores that are down and not about to resume."""
        if status.failure:
            self.fail(status.failure)
            return
        for core, replica in zip(self.cores, status.replicas, strict=False):
            core.apply_status(replica)
            if not core.ready:
                self._prefill.drop_core(core.core_index)
        if self.ready:
            self._moves.apply_status(status)
        self.sleep.apply_status(self._output.sequences.values())
        if self._config.epoch != FIRST_EPOCH and self.sleep.is_asleep:
            self._end_start()

    def _move(self, sequence: Sequence) -> None:
        self._isolation_queue[sequence.core_index].remove_sequence(sequence)
        if self._may_continue(sequence):
            left = self.cores[sequence.core_index]
            lost_time = None if left.ready else left.lost_time
            core = self._router.choose_core(sequence.request)
            self._output.move_sequence(sequence, core.core_index, core.load)
            self._resubmit(sequence, lost_time)

    def _handle_lost_replica(self, lost: ReplicaLost) -> None:
        for indices, is_suspect in ((lost.suspects, True), (lost.unsuspected, False)):
            for index in int32_view(indices).tolist():
                sequence = self._output.sequences.get(index)
                self._prefill.suspect(index, is_suspect=is_suspect)
                if sequence is not None:
                    sequence.mark_suspected(is_suspect=is_suspect)

    def _fail_request(self, request_index: int, error: str) -> None:
        if sequence := self._output.sequences.get(request_index):
            self._output.fail_sequences([sequence], error)

    def _handle_lost_outputs(self, core_index: int) -> None:
        """Fail the sequences without progress since the last loss. The others continue as after a crash of the core."""
        sequences = list(self._output.sequences.values())
        stuck = [s for s in sequences if s.core_index == core_index and s.lose_outputs()]
        self._output.fail_sequences(
            stuck, "the engine lost this request's tokens twice; retry the request"
        )
