"""The engine core: one process that sends steps to a replica's workers and tokens to its frontends.

It has one thread with one poll. The scheduler decides; this loop moves messages. It keeps up to `max_in_flight` steps
at the workers, so that they do not have to wait.
"""

from __future__ import annotations

import gc
import logging
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from ..protocol import transport
from ..protocol.arrays import int32_bytes, int32_view
from ..protocol.config import EngineConfig
from ..protocol.errors import EngineError, PeerLostError, counted
from ..protocol.heartbeat import HeartbeatWriter, seconds_to_beat
from ..protocol.messages import (
    AbortRequests,
    AddRequests,
    AppendInputs,
    CallResult,
    ClientHello,
    ClientMessage,
    EndReasoning,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PrepareGrammars,
    ReplicaCall,
    SchedulerStats,
)
from ..protocol.process import StopSignal
from ..protocol.supervisor_messages import Heartbeat, Stage
from ..protocol.transport import FrameTooLarge, Hub, StatusReporter
from ..protocol.worker_messages import (
    GrammarOutput,
    KVConnectorReport,
    LoraLoaded,
    ModelRunnerOutput,
    SchedulerOutput,
    Shutdown,
    WorkerMemory,
)
from .kv_cache.connector import KVConnector
from .kv_cache.connectors.transfer_ends import TransferEnds
from .message_checks import (
    are_valid_drafts,
    is_valid_connector_output,
    is_valid_hello,
    is_valid_message,
    is_valid_output,
    split_requests,
)
from .pause import Pause
from .replay.dump_on_demand import dump_event_log
from .replay.recorder import Setup, make_core_scheduler
from .reporting.client_calls import answer_call
from .reporting.client_updates import ClientUpdates
from .reporting.kv_event_publisher import KVEventPublisher
from .reporting.loss import report_loss
from .reporting.preemption_advice import PreemptionAdvice
from .reporting.relayed_calls import RelayedCalls
from .reporting.request_times import RequestTimes
from .reporting.stats_log import StatsLog
from .scheduler.client_outputs import drop_logprobs
from .structured_output.manager import StructuredOutputManager
from .worker_group import WorkerGroup, raise_if_worker_lost

logger = logging.getLogger(__name__)

GRAMMAR_POLL_MS = 1
"""Poll interval in milliseconds while grammars are being compiled."""

INDEX_S = 10.0
"""Seconds that a core waits for its workers to report which blocks they have on disk."""

FLUSH_S = 5.0
"""Seconds that a core which shuts down gives its workers to store blocks of the KV cache."""


class EngineCore:
    """The core of one replica.

    `run` returns on `STOP_PROCESS`. It raises EngineError if the core fails, or if the supervisor reports a lost worker
    by a signal. A peer's messages are dropped until it answers the greeting, because they may be meant for a previous
    core.
    """

    def __init__(
        self,
        config: EngineConfig,
        core_index: int,
        context: zmq.Context[Any],
        status: StatusReporter,
    ) -> None:
        self._config = config
        self._core_index = core_index
        self._stop = StopSignal()
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            self._stop.add_signal(signum)
        self._status = status
        self._heartbeats = HeartbeatWriter(config, f"core {core_index}")
        self._clients: Hub[ClientMessage] = Hub(
            context, config.core_address(core_index), ClientMessage
        )
        self._workers = WorkerGroup(context, config, core_index)
        self._poller = zmq.Poller()
        for socket in (self._stop.fd, self._workers.socket, self._clients.socket):
            self._poller.register(socket, zmq.POLLIN)
        self._grammars = StructuredOutputManager(
            config.model.verified_tokenizer_path,
            config.model.vocab_size,
            config.model.eos_token_ids,
        )
        self._kv_events: KVEventPublisher | None = None
        if config.cache.kv_events is not None:
            self._kv_events = KVEventPublisher(context, config.cache.kv_events, core_index)
            if self._kv_events.replay_socket is not None:
                self._poller.register(self._kv_events.replay_socket, zmq.POLLIN)
        parallel = config.parallel
        is_one_of_several = parallel.data_parallel_size > 1
        self._logs_kv_events = self._kv_events is not None or is_one_of_several
        self._updates: ClientUpdates | None = None
        if is_one_of_several or parallel.api_server_count > 1:
            self._updates = ClientUpdates()
        self._client_indices: dict[bytes, int] = {}
        self._client_ids: dict[int, bytes] = {}
        self._relayed_calls = RelayedCalls(self._clients, self._client_ids)
        self._num_steps = self._num_tokens = 0
        self._next_beat = self._waiting_since = 0.0
        self._vocab_size = config.model.vocab_size
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._in_flight: deque[SchedulerOutput] = deque()
        self._transfer_ends = TransferEnds(config.parallel.workers_per_core)
        self._outputs: list[dict[int, EngineCoreOutputs]] = []
        """Outputs that are not sent yet, in the order in which the clients must receive them."""
        self._num_reported_dropped_frames = 0
        self._has_dumped_violations = False
        # The supervisor kills a worker that hangs in a step before this time has passed.
        self._step_timeout_s = config.recovery.step_timeout_s + config.recovery.heartbeat_timeout_s
        self._max_in_flight = config.scheduler.max_steps_in_flight
        self._preemption_advice = PreemptionAdvice()
        self._stats_log: StatsLog | None = None
        if config.frontend.log_stats:
            interval_s = config.frontend.log_stats_interval_s
            self._stats_log = StatsLog(core_index, interval_s, time.monotonic())

    def run(self) -> None:
        """Allocate the KV cache, then serve until `STOP_PROCESS`. Raise EngineError if the replica failed."""
        self._status.report(Stage.STARTING)
        try:
            memory = self._workers.await_kv_cache(
                self._stop, lambda: self._heartbeats.beat(Heartbeat())
            )
            if memory is None:
                return
            self._start_scheduler(memory)
            try:
                self._serve()
            except Exception as error:
                # Apart from frame sizes, every EngineError in the core reports the failure of a worker.
                is_own = not isinstance(error, EngineError) or isinstance(error, FrameTooLarge)
                report_loss(
                    self._scheduler,
                    self._send_outputs,
                    self._clients,
                    self._client_indices,
                    is_own=is_own,
                    is_of_peer=isinstance(error, PeerLostError),
                )
                self._dump_event_log("crash")
                raise
            self._await_connector(lambda each: each.is_flushed(), FLUSH_S)
            self._workers.send(Shutdown())
            self._scheduler.shutdown()
        finally:
            self._grammars.close()

    def _serve(self) -> None:
        while not self._stop.requested:
            # One poll of all sockets is cheaper than trying to receive from a single empty one.
            is_compiling = self._grammars.is_compiling
            timeout_ms = GRAMMAR_POLL_MS if is_compiling else 1 + int(seconds_to_beat() * 1000)
            readable = dict(self._poller.poll(timeout_ms))
            now = time.monotonic()
            if now >= self._next_beat:
                self._beat(now)
            if not (readable or is_compiling or self._scheduler.has_requests()):
                continue
            if self._clients.socket in readable:
                self._receive_client_messages()
            if self._workers.socket in readable:
                self._receive_worker_message()
            if is_compiling:
                for key, grammar_error in self._grammars.poll():
                    self._scheduler.grammar_ready(key, grammar_error)
            self._dispatch_steps()
            self._send_outputs()
            self._pause.advance(len(self._in_flight))
            if self._logs_kv_events:
                self._publish_kv_events()
            if self._updates is not None:
                for client_index, update in self._updates.take_updates():
                    self._clients.send(self._client_ids[client_index], update)
            self._scheduler.end_turn()
            if self._stop.fd in readable:
                signals = self._stop.take_signals()
                raise_if_worker_lost(signals)
                if signal.SIGUSR1 in signals:
                    self._dump_event_log("signal")

    def _await_connector(self, is_done: Callable[[KVConnector], bool], limit_s: float) -> None:
        """Serve the workers until `is_done` holds for the KV connector, for up to `limit_s` seconds."""
        connector = self._scheduler.kv_connector
        deadline = time.monotonic() + limit_s
        while connector and not is_done(connector) and (now := time.monotonic()) < deadline:
            if now >= self._next_beat:
                self._beat(now)
            self._dispatch_steps()
            if self._workers.socket.poll(GRAMMAR_POLL_MS * 10):
                self._receive_worker_message()

    def close(self) -> None:
        """Close every socket once its queued messages have been sent."""
        self._heartbeats.close()
        if self._kv_events is not None:
            self._kv_events.close()
        self._clients.close()
        self._workers.close()

    def _start_scheduler(self, memory: WorkerMemory) -> None:
        config, num_blocks = self._config, memory.num_blocks
        self._request_times = RequestTimes(self._max_num_seqs, memory.num_cores)
        setup = Setup.from_config(config, memory, self._core_index)
        self._scheduler = make_core_scheduler(
            setup, self._grammars, log_kv_events=self._logs_kv_events
        )
        self._pause = Pause(
            setup.make_ready(config),
            self._scheduler,
            self._clients,
            self._client_indices,
            self._add_requests,
        )
        if self._workers.held:
            self._scheduler.adopt_blocks(self._workers.held)
            logger.info("adopted the blocks of %s", counted(len(self._workers.held), "request"))
        for report in self._workers.early_reports:
            self._handle_transfers(report)
        self._workers.early_reports.clear()
        self._await_connector(lambda each: each.is_ready() or self._stop.requested, INDEX_S)
        # Objects that exist now live as long as the process, so exclude them from garbage collection.
        gc.collect()
        gc.freeze()
        gc.enable()
        num_tokens = num_blocks // len(memory.groups) * config.cache.block_size
        windows = ", more with windows" if len(memory.groups) > 1 else ""
        self._status.report(
            Stage.READY, f"KV cache of {num_blocks} blocks, {num_tokens} tokens{windows}"
        )

    def _receive_client_messages(self) -> None:
        while (received := self._clients.receive()) is not None:
            identity, message = received
            client_index = self._client_indices.get(identity)
            if message is None:
                if client_index is not None:
                    del self._client_indices[identity], self._client_ids[client_index]
                    self._finish_client(client_index)
                    if self._updates is not None:
                        self._updates.remove_client(client_index)
                self._clients.send(identity, self._pause.ready)
            elif isinstance(message, ClientHello):
                if not is_valid_hello(identity, message, self._config):
                    self._clients.num_dropped_frames += 1
                    continue
                client_index = message.client_index
                # A frontend that sends a second hello has lost its earlier requests.
                self._finish_client(client_index)
                self._client_indices[identity] = client_index
                self._client_ids[client_index] = identity
                self._scheduler.add_client(client_index)
                if self._updates is not None:
                    self._updates.add_client(client_index)
                self._add_requests(client_index, message.requests)
                if message.is_whole:
                    self._scheduler.end_adoption(client_index)
                self._pause.apply_hello(identity, message)
            elif client_index is None or not is_valid_message(message):
                self._clients.num_dropped_frames += 1
            elif self._pause.take_message(identity, client_index, message):
                continue
            elif isinstance(message, AddRequests):
                self._add_requests(client_index, message.requests)
                if message.ends_greeting:
                    self._scheduler.end_adoption(client_index)
            elif isinstance(message, AppendInputs):
                self._scheduler.append_inputs(client_index, message)
            elif isinstance(message, AbortRequests):
                indices = int32_view(message.request_indices).tolist()
                reason = FinishReason.MOVED if message.are_moved else FinishReason.ABORT
                self._scheduler.finish_requests([(client_index, i) for i in indices], reason)
            elif isinstance(message, PrepareGrammars):
                self._grammars.prepare()
            elif isinstance(message, EndReasoning):
                self._relayed_calls.relay(client_index, message)
            elif isinstance(message, CallResult):
                self._relayed_calls.apply_result(client_index, message)
            elif isinstance(message, ReplicaCall):
                result = answer_call(self._scheduler, message, self._dump_event_log)
                self._clients.send(identity, result)

    def _finish_client(self, client_index: int) -> None:
        self._pause.drop_requests(client_index)
        self._relayed_calls.remove_client(client_index)
        self._scheduler.finish_client(client_index)
        self._request_times.remove_client(client_index)

    def _add_requests(self, client_index: int, requests: list[EngineCoreRequest]) -> None:
        now = time.monotonic()
        valid, refused = split_requests(requests, self._vocab_size)
        if len(valid) < len(requests):
            self._clients.num_dropped_frames += 1
            self._clients.send(self._client_ids[client_index], AbortRequests(int32_bytes(refused)))
        for request in valid:
            self._scheduler.add_request(client_index, request, now)
        if self._updates is not None:
            self._updates.add_requests(client_index, len(valid))

    def _receive_worker_message(self) -> None:
        message = self._workers.receive()
        if isinstance(message, ModelRunnerOutput):
            self._handle_step_result(message)
        elif isinstance(message, LoraLoaded):
            self._scheduler.lora_loaded(message.number, message.error or None)
            if message.error and self._updates is not None:
                self._updates.drop_adapter(message.number)
        elif isinstance(message, KVConnectorReport):
            self._handle_transfers(message)
        elif message is not None:
            if are_valid_drafts(message, self._vocab_size, self._max_num_seqs):
                self._scheduler.update_draft_token_ids(message)
            else:
                self._workers.drop_frame()

    def _handle_transfers(self, report: KVConnectorReport) -> None:
        """Apply a worker's report on KV transfers."""
        if is_valid_connector_output(report.output):
            output = self._transfer_ends.add_report(report)
            self._scheduler.update_from_connector(report.rank, output, time.monotonic())
        else:
            self._workers.drop_frame()

    def _handle_step_result(self, result: ModelRunnerOutput) -> None:
        if not self._in_flight or result.step < self._in_flight[0].step:
            self._workers.drop_frame()
            return
        if not is_valid_output(result, self._vocab_size, self._max_num_seqs):
            raise EngineError(
                f"the worker returned out-of-range token or slot ids for step {result.step}"
            )
        now = time.monotonic()
        self._request_times.cores.record(self._in_flight[0], now - self._waiting_since)
        self._waiting_since = now
        self._outputs.append(self._scheduler.update_from_output(self._in_flight[0], result, now))
        self._in_flight.popleft()
        self._num_steps += 1
        is_first = not self._num_tokens
        self._num_tokens += len(result.sampled_token_ids) // 4
        if is_first and self._num_tokens:
            # Report the first token immediately, because the supervisor counts crashes without a token.
            self._beat(now)
        # Workers wait for the bitmask, so it is sent before the outputs.
        if self._in_flight and self._in_flight[0].grammar_slots:
            self._send_grammar_bitmask(self._in_flight[0])

    def _send_outputs(self) -> None:
        """Send outputs of steps, and other updates of their requests, to the clients.

        Called right after the next step is sent, so that the I/O thread wakes up only once for both.
        """
        if urgent := self._scheduler.take_outputs(time.monotonic()):
            self._outputs.append(urgent)
        unsent, self._outputs = self._outputs, []
        for outputs in unsent:
            for client_index, client_outputs in outputs.items():
                if client_outputs.stats is not None:
                    self._record_stats(client_outputs.stats)
                self._request_times.write(client_index, client_outputs)
                self._send_to_client(client_index, client_outputs)
                num_ended = len(client_outputs.finished_set) // 4
                if self._updates is not None and num_ended:
                    self._updates.remove_requests(client_index, num_ended)
        if self._scheduler.invariant_violations:
            self._report_violations()

    def _record_stats(self, stats: SchedulerStats) -> None:
        stats.num_dropped_frames = self._count_dropped_frames()
        self._preemption_advice.record(stats.num_block_preemptions, time.monotonic())
        if self._stats_log is not None:
            self._stats_log.record(stats)

    def _send_to_client(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        """Send outputs to a client. If a frame cannot hold them, fail the requests with the most log-probabilities."""
        identity = self._client_ids[client_index]
        try:
            self._clients.send(identity, outputs)
        except FrameTooLarge as error:
            logger.error("%s; failing requests with log-probabilities", error)
            failed = drop_logprobs(outputs, error.size - transport.MAX_FRAME_BYTES)
            self._clients.send(identity, outputs)
            self._scheduler.finish_requests(
                [(client_index, index) for index in failed], FinishReason.ABORT
            )

    def _report_violations(self) -> None:
        for violation in self._scheduler.invariant_violations:
            logger.error("a scheduler invariant is violated: %s", violation)
        self._scheduler.invariant_violations.clear()
        if not self._has_dumped_violations:
            self._has_dumped_violations = True
            self._dump_event_log("violation")

    def _dump_event_log(self, reason: str) -> tuple[bool, str]:
        """Write the event log to a file. Return whether it worked, and the path or the error message."""
        return dump_event_log(self._scheduler, self._config, reason)

    def _count_dropped_frames(self) -> int:
        """Return the number of invalid messages dropped since the last call."""
        total = self._clients.num_dropped_frames + self._workers.num_dropped_frames
        if self._kv_events is not None:
            total += self._kv_events.num_dropped_frames
        new = total - self._num_reported_dropped_frames
        self._num_reported_dropped_frames = total
        return new

    def _publish_kv_events(self) -> None:
        if events := self._scheduler.take_kv_events():
            if self._kv_events is not None:
                self._kv_events.publish(events)
            if self._updates is not None:
                self._updates.apply_events(events)
        if self._kv_events is not None:
            self._kv_events.serve_replays()

    def _dispatch_steps(self) -> None:
        if self._pause.stops_steps:
            return
        while len(self._in_flight) < self._max_in_flight and self._scheduler.has_requests():
            now = time.monotonic()
            step = self._scheduler.schedule(now)
            self._request_times.scheduler.record(step, time.monotonic() - now)
            if step is None:
                return
            self._workers.send(step)
            if self._updates is not None:
                self._updates.begin_loads(step.lora_loads)
            if not self._in_flight:
                self._waiting_since = time.monotonic()
                if step.grammar_slots:
                    self._send_grammar_bitmask(step)
            self._in_flight.append(step)

    def _send_grammar_bitmask(self, step: SchedulerOutput) -> None:
        bitmask = self._scheduler.get_grammar_bitmask(step)
        forced = self._scheduler.get_forced_tokens(step)
        self._workers.send(GrammarOutput(step.step, bitmask, forced))

    def _beat(self, now: float) -> None:
        self._next_beat = now + seconds_to_beat()
        waited_s = now - self._waiting_since
        if self._in_flight and waited_s > self._step_timeout_s:
            step = self._in_flight[0].step
            raise EngineError(f"no worker has returned step {step} for {waited_s:.0f} s")
        num_running, num_waiting = self._scheduler.get_request_counts()
        usage = self._scheduler.get_kv_cache_usage()
        if self._stats_log is not None:
            self._stats_log.write_if_due(now, num_running, num_waiting, usage)
        self._heartbeats.beat(
            Heartbeat(
                num_steps=self._num_steps,
                num_tokens=self._num_tokens,
                num_running=num_running,
                num_waiting=num_waiting,
                kv_cache_usage=usage,
            )
        )
