"""The engine as the HTTP layer sees it: submit sequences, read what they generate."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Final

import zmq

from ..protocol.arrays import Int32Array, int32_view
from ..protocol.block_hash import HASH_BYTES, block_keys, hash_blocks, root_hash
from ..protocol.config import FIRST_EPOCH, EngineConfig
from ..protocol.errors import CONVICTION, EngineError
from ..protocol.messages import (
    CoreReady,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ReplicaLost,
)
from ..protocol.supervisor_messages import EngineStatus
from .convictions import Convictions
from .core_connection import CoreConnection, CoreEvents
from .core_load import Overloaded
from .detokenizer import IncrementalDetokenizer
from .engine_watch import EngineWatch
from .input_processor import InputProcessor
from .logprobs import PositionLogprobs
from .metrics import Metrics
from .off_loop import OffLoop
from .output_processor import OutputProcessor
from .request_group import MAX_SILENT_DEATHS, Delta, RequestGroup, Sequence, SequenceRequest
from .routing import choose
from .tokenizer import Tokenizer
from .trials import Trials

__all__ = [
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

HASHED_AT_ONCE: Final = 4096
"""Prompt tokens whose blocks are hashed before other tasks get their turn: well under a millisecond."""

DEADLINE_GRACE_S: Final = 0.25
"""So long after a deadline the frontend ends what the core, which can say more of it, should have ended."""

MAX_REQUEST_INDEX: Final = 2**31 - 1

NO_MORE: Final[Mapping[int, int]] = {}


class EngineDraining(EngineError):
    """The server is about to stop and takes no new requests."""


class EngineDead(EngineError):
    """The engine has failed; the message says why."""


class ReplicaUnavailable(EngineError):
    """The replica that was asked for takes no requests now."""


class EngineClient:
    """One frontend's access to every core.

    `draining` is set by the server, which uses `off_loop` as well. `dead_reason` is None as long as the engine lives.
    All methods belong to the event loop that ran `start`.
    """

    def __init__(self, config: EngineConfig, client_index: int, tokenizer: Tokenizer) -> None:
        self.draining = False
        self.dead_reason: str | None = None
        self.metrics = Metrics(config, client_index)
        self._config = config
        self._client_index = client_index
        self._tokenizer = tokenizer
        self.off_loop = OffLoop()
        self._input = InputProcessor(config, tokenizer, self.off_loop)
        self._output = OutputProcessor(self.metrics, self._abort_at_core)
        self._context: zmq.Context[Any] = zmq.Context()
        self._cores: list[CoreConnection] = []
        self._trials: list[Trials] = []
        self._convictions = Convictions()
        self.watch: EngineWatch | None = None
        self.metrics.watch_replicas(self._is_up)
        self._started: asyncio.Future[None] | None = None
        self._last_index = -1

    @property
    def ready(self) -> bool:
        """Some core takes requests."""
        return self.dead_reason is None and any(self._open_cores())

    @property
    def num_inflight(self) -> int:
        """Sequences that have not ended."""
        return len(self._output.sequences)

    def find_overload(self) -> Overloaded | None:
        """How full the queues are, if no replica that serves has room for one more request."""
        overload = None
        for core in self._open_cores():
            try:
                core.load.check(1, 1)
            except Overloaded as error:
                overload = error
            else:
                return None
        return overload

    async def start(self) -> None:
        """Connect, and wait until every core can execute; in a later life one will do.

        Raises EngineDead if one never can.
        """
        self._started = asyncio.get_running_loop().create_future()
        self.watch = EngineWatch(self._context, self._config, self._status_is_known)
        events = CoreEvents(
            on_ready=self._core_is_ready,
            on_outputs=self._take_outputs,
            on_lost_outputs=self._outputs_were_lost,
            on_replica_lost=self._replica_was_lost,
            on_too_large=self._request_is_too_large,
            on_refused=self.fail,
        )
        for core_index in range(self._config.parallel.data_parallel_size):
            core = CoreConnection(
                self._context, self._config, self._client_index, core_index, events
            )
            self._cores.append(core)
            self._trials.append(Trials(self._send))
            self.metrics.watch_dropped_frames(core_index, core.num_dropped_frames)
        watch = self.watch
        self.metrics.watch_status(lambda: watch.status)
        await self._started

    def close(self) -> None:
        """Leave the cores. Groups in flight fail."""
        if self.dead_reason is None:
            self.fail("the server has stopped")
        while self._cores:
            self._trials.pop().close()
            self._cores.pop().close()
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        self._context.term()
        self.off_loop.close()

    def fail(self, reason: str) -> None:
        """The engine is dead: fail everything in flight and refuse what comes."""
        if self.dead_reason is not None:
            return
        self.dead_reason = reason
        error = EngineDead(reason)
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        self._output.fail(self._output.sequences.values(), reason)
        for core in self._cores:
            core.fail_calls(error)

    async def submit(self, sequences: list[SequenceRequest], *, request_id: str) -> RequestGroup:
        """Start generating. The sequences of one prompt (the same object) share a core.

        Raises ParameterError for what the model cannot serve, Overloaded when the queue is full,
        ReplicaUnavailable, EngineDraining and EngineDead. Nothing has started when it raises.
        """
        arrival_time = time.monotonic()
        self._check_open()
        requests = await self._input.process(sequences, arrival_time)
        await self._hash_prompts(sequences, requests)
        self._check_open()
        for request in requests:
            request.request_id = request_id
        cores = self._route(sequences, requests)
        started = [
            self._start_sequence(*each) for each in zip(sequences, requests, cores, strict=True)
        ]
        group = RequestGroup(
            request_id,
            started,
            [len(list(same)) for _, same in groupby(sequences, lambda s: id(s.prompt_token_ids))],
            stream_interval=self._config.frontend.stream_interval,
            on_abort=self._abort_group,
        )
        self._watch_deadline(group, sequences[0].deadline)
        if any(request in self._convictions for request in requests):
            # Nothing has been sent in this tick.
            self._end_group(group, FinishReason.ERROR, CONVICTION)
        return group

    async def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached prefixes; False where running requests prevent it.

        Raises EngineError when a replica is not up, which may keep what its running requests have. The others have
        forgotten theirs.
        """
        self._check_alive()
        answers = await asyncio.gather(
            *(core.reset_prefix_cache(reset_running) for core in self._cores)
        )
        return all(answer.ok for answer in answers)

    async def dump_event_logs(self) -> list[str]:
        """Have every core write its last events to a file. Returns the paths. Raises EngineError."""
        self._check_alive()
        answers = await asyncio.gather(*(core.dump_event_log() for core in self._cores))
        for answer in answers:
            if not answer.ok:
                raise EngineError(answer.detail)
        return [answer.detail for answer in answers]

    def _check_alive(self) -> None:
        if self.dead_reason is not None:
            raise EngineDead(self.dead_reason)
        if not self._cores:
            raise EngineDead("the engine has not been started")

    def _check_open(self) -> None:
        self._check_alive()
        if self.draining:
            self.metrics.record_rejection(0, "draining")
            raise EngineDraining("the server is shutting down and takes no new requests")

    async def _hash_prompts(
        self, sequences: list[SequenceRequest], requests: list[EngineCoreRequest]
    ) -> None:
        """Fill in the hashes of the full prompt blocks; equal prompts (the same object) share them."""
        if not self._config.cache.enable_prefix_caching:
            return
        hashed: dict[tuple[int, str | None], tuple[bytes, bytes]] = {}
        for sequence, request in zip(sequences, requests, strict=True):
            key = (id(sequence.prompt_token_ids), sequence.cache_salt)
            if key not in hashed:
                root = root_hash(cache_salt=sequence.cache_salt)
                prompt = int32_view(request.prompt_token_ids)
                hashed[key] = root, await self._hash_blocks(prompt, root)
            request.root_hash, request.block_hashes = hashed[key]

    async def _hash_blocks(self, prompt: Int32Array, root: bytes) -> bytes:
        block_size, algorithm = self._config.cache.block_size, self._config.cache.prefix_hash
        slice_tokens = max(HASHED_AT_ONCE // block_size, 1) * block_size
        hashes = hash_blocks(prompt[:slice_tokens], block_size, root, (), algorithm)
        for start in range(slice_tokens, len(prompt), slice_tokens):
            await asyncio.sleep(0)
            parent = hashes[-HASH_BYTES:]
            piece = prompt[start : start + slice_tokens]
            hashes += hash_blocks(piece, block_size, parent, (), algorithm)
        return hashes

    def _open_cores(self) -> list[CoreConnection]:
        """The cores that take new requests."""
        return [core for core in self._cores if core.ready and core.is_serving]

    def _route(
        self, sequences: list[SequenceRequest], requests: list[EngineCoreRequest]
    ) -> list[CoreConnection]:
        """A core for each sequence. Raises Overloaded and ReplicaUnavailable."""
        new_tokens: Counter[int] = Counter()
        new_sequences: Counter[int] = Counter()
        routed: list[CoreConnection] = []
        for position, (sequence, request) in enumerate(zip(sequences, requests, strict=True)):
            prompt = sequence.prompt_token_ids
            if position == 0 or prompt is not sequences[position - 1].prompt_token_ids:
                core = self._choose(
                    self._block_keys(request), sequence.data_parallel_rank, new_sequences
                )
            new_sequences[core.core_index] += 1
            new_tokens[core.core_index] += len(request.prompt_token_ids) // 4
            routed.append(core)
        for core_index, count in new_sequences.items():
            try:
                self._cores[core_index].load.check(count, new_tokens[core_index])
            except Overloaded:
                self.metrics.record_rejection(core_index, "queue_full")
                raise
        return routed

    def _choose(
        self, keys: list[int], rank: int | None = None, more: Mapping[int, int] = NO_MORE
    ) -> CoreConnection:
        """The core for a prompt with these blocks, `more` sequences being about to go to each."""
        candidates = self._open_cores()
        if rank is not None:
            if self._cores[rank] not in candidates:
                raise ReplicaUnavailable(f"replica {rank} takes no requests now")
            return self._cores[rank]
        if not candidates:
            # The requests wait for the first that opens, which no drained one does by itself.
            candidates = [core for core in self._cores if core.is_in_rotation] or self._cores
        if len(candidates) == 1:
            return candidates[0]
        return candidates[
            choose(
                [core.load.total + more.get(core.core_index, 0) for core in candidates],
                [core.load.prefixes.count(keys) for core in candidates],
                len(keys),
                keys[0] if keys else 0,
                self._config.scheduler.max_num_seqs,
            )
        ]

    def _block_keys(self, request: EngineCoreRequest) -> list[int]:
        """The keys by which a replica is chosen that has the prompt's blocks; none where there is only one."""
        return block_keys(request.block_hashes) if len(self._cores) > 1 else []

    def _start_sequence(
        self, wanted: SequenceRequest, request: EngineCoreRequest, core: CoreConnection
    ) -> Sequence:
        params = wanted.params
        prompt = memoryview(request.prompt_token_ids).cast("i")
        detokenizer = None
        if params.detokenize:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                prompt,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
        request.request_index = self._next_request_index()
        keys = self._block_keys(request)
        sequence = Sequence(
            request, params, len(prompt), detokenizer, core.core_index, core.load, keys
        )
        self._output.sequences[request.request_index] = sequence
        core.load.submitted(len(prompt), keys)
        self._send(sequence)
        return sequence

    def _send(self, sequence: Sequence) -> None:
        """To its core: at once, or with the answer to the greeting if the core is not ready."""
        core = self._cores[sequence.core_index]
        sequence.epoch = core.epoch if core.ready else 0
        core.add(sequence.request)

    def _next_request_index(self) -> int:
        index = self._last_index
        while True:
            index = 0 if index == MAX_REQUEST_INDEX else index + 1
            if index not in self._output.sequences:
                self._last_index = index
                return index

    def _abort_group(self, group: RequestGroup) -> None:
        self._end_group(group, FinishReason.ABORT)

    def _end_group(
        self, group: RequestGroup, reason: FinishReason, error: str | None = None
    ) -> None:
        for sequence in group.sequences:
            if not sequence.finished:
                self._output.finish(sequence, reason, error=error)
                self._abort_at_core(sequence)

    def _watch_deadline(self, group: RequestGroup, deadline: float) -> None:
        """A core ends what is late between two steps, and none may come for long, or no core be there."""
        if deadline:
            group.deadline_timer = asyncio.get_running_loop().call_later(
                deadline + DEADLINE_GRACE_S - time.monotonic(), self._expire_group, group
            )

    def _expire_group(self, group: RequestGroup) -> None:
        for sequence in group.sequences:
            if not sequence.finished:
                self._output.expire(sequence)

    def _abort_at_core(self, sequence: Sequence) -> None:
        self._cores[sequence.core_index].abort(sequence.request_index)

    def _core_is_ready(self, ready: CoreReady) -> None:
        self.metrics.record_ready(ready)
        num_frontends = self._config.parallel.api_server_count
        self._trials[ready.core_index].begin((self._client_index + ready.epoch) % num_frontends)
        for sequence in list(self._output.sequences.values()):
            if sequence.core_index == ready.core_index and self._may_go_on(sequence):
                self._resubmit(sequence)
        is_first_life = self._config.epoch == FIRST_EPOCH
        can_serve = not is_first_life or all(core.ready for core in self._cores)
        if can_serve and self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _may_go_on(self, sequence: Sequence) -> bool:
        """Whether a sequence is tried again; it has failed if not."""
        if sequence.finished:
            return False
        if self._cores[sequence.core_index].died_silently(sequence.epoch):
            sequence.accuse_silently()
        if sequence.num_silent_deaths > MAX_SILENT_DEATHS:
            self._convict(sequence)
        return not sequence.finished

    def _convict(self, sequence: Sequence) -> None:
        """A sequence is the cause of deaths. Its group fails with it: there is no answer without it."""
        self._convictions.add(sequence.request)
        if self.watch is not None:
            self.watch.cause_found()
        self._end_group(sequence.group, FinishReason.ERROR, CONVICTION)

    def _resubmit(self, sequence: Sequence) -> None:
        self._output.resubmit(sequence, self._next_request_index())
        trials = self._trials[sequence.core_index]
        if sequence.is_silent_suspect:
            sequence.epoch = 0
            trials.add(sequence)
        else:
            self._send(sequence)
            trials.wait_for(sequence)

    def _take_outputs(self, outputs: EngineCoreOutputs) -> None:
        for done in outputs.finished:
            sequence = self._output.sequences.get(done.request_index)
            if sequence is not None and done.message == CONVICTION:
                self._convict(sequence)
        self._output.process(outputs)
        self._trials[outputs.core_index].advance()

    def _is_up(self, replica: int) -> bool:
        return self.watch is not None and self.watch.is_up(replica)

    def _status_is_known(self, status: EngineStatus) -> None:
        """Sequences of a core that is gone go on at another one, unless their own is about to come back."""
        for core, replica in zip(self._cores, status.replicas, strict=False):
            core.note_status(replica)
        if not self.ready:
            return
        resuming = {replica.replica for replica in status.replicas if replica.is_resuming}
        for sequence in list(self._output.sequences.values()):
            core_index = sequence.core_index
            if not self._cores[core_index].ready and core_index not in resuming:
                self._move(sequence)

    def _move(self, sequence: Sequence) -> None:
        self._trials[sequence.core_index].withdraw(sequence)
        if self._may_go_on(sequence):
            core = self._choose(sequence.block_keys)
            self._output.move(sequence, core.core_index, core.load)
            self._resubmit(sequence)

    def _replica_was_lost(self, lost: ReplicaLost) -> None:
        for indices, is_suspect in ((lost.suspects, True), (lost.bystanders, False)):
            for index in int32_view(indices).tolist():
                sequence = self._output.sequences.get(index)
                if sequence is not None:
                    sequence.accuse(is_suspect=is_suspect)

    def _request_is_too_large(self, request_index: int) -> None:
        self._output.fail(
            [self._output.sequences[request_index]],
            "this request is larger than what the engine's processes can tell one another",
        )

    def _outputs_were_lost(self, core_index: int) -> None:
        """The sequences of the core go on as after its death. Those without progress since the last such loss fail."""
        at_core = [s for s in self._output.sequences.values() if s.core_index == core_index]
        stuck = [sequence for sequence in at_core if sequence.lose_outputs()]
        self._output.fail(stuck, "its tokens were lost twice between the engine's processes")
