"""A harness that drives a scheduler and a model worker like the core loop, and checks them after every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from engine.core.replay.recorder import Setup
from engine.core.scheduler.features.encoder_cache_connector import EncoderCacheConnector
from engine.core.scheduler.scheduler import Scheduler
from engine.core.state.request import Request
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.block_hash import hash_blocks, root_hash
from engine.protocol.config import (
    CacheConfig,
    KVTransferConfig,
    LoadFailurePolicy,
    PrefixHash,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.kv_cache_groups import (
    FULL_ATTENTION,
    AttentionKind,
    KVCacheGroup,
    max_request_tokens,
)
from engine.protocol.kv_transfer.direct import request_name
from engine.protocol.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EventKind,
    FinishReason,
    SchedulerStats,
)
from engine.protocol.pooling_params import PoolingParams
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import GrammarOutput, SchedulerOutput
from support.scheduler.client_view import REFUSED, ClientView, Key, adapter, run_alone
from support.scheduler.diffusion_worker import worker_class
from support.scheduler.model_connector import ModelConnector
from support.scheduler.model_grammar import ModelGrammar
from support.scheduler.model_worker import Row


class Harness:
    LOADED: tuple[str, ...] = ("w", "x", "y", "z")
    """The names of the adapters that are loaded from the start, as far as they fit."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        vocab_size: int = 512,
        max_in_flight: int = 2,
        enable_prefix_caching: bool = True,
        prefix_hash: PrefixHash = PrefixHash.SHA256,
        log_kv_events: bool = False,
        connector: ModelConnector | None = None,
        kv_role: str = "kv_both",
        load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
        transfer_timeout_s: float = 1000.0,
        load_timeout_s: float = 1000.0,
        speculative: SpeculativeConfig | None = None,
        propose: Callable[[Row], list[int]] | None = None,
        encoder_connector: EncoderCacheConnector | None = None,
        groups: tuple[KVCacheGroup, ...] = FULL_ATTENTION,
        num_host_blocks: int = 0,
        **limits: object,
    ) -> None:
        self.config = SchedulerConfig(
            **{"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits}, speculative=speculative
        )
        self.cache_config = CacheConfig(
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            prefix_hash=prefix_hash,
        )
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.max_in_flight = max_in_flight
        self.grammar = ModelGrammar(vocab_size, forces=self.config.async_scheduling)
        self.kv_transfer = connector and KVTransferConfig(
            "model",
            kv_role,  # type: ignore[arg-type]
            "module",
            kv_load_failure_policy=load_failure_policy,
            transfer_timeout_s=transfer_timeout_s,
            load_timeout_s=load_timeout_s,
        )
        self.speculative = speculative
        self.connector = connector
        self._setup = Setup(
            self.config,
            self.cache_config,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            kv_cache_groups=groups,
            num_host_blocks=num_host_blocks,
            kv_transfer=self.kv_transfer,
        )
        self._log_kv_events = log_kv_events
        self._encoder_connector = encoder_connector
        self.scheduler = self._make_scheduler()
        num_uncertain = 0
        if drafts := speculative:
            num_uncertain = 4 * (drafts.num_speculative_tokens + 1) + drafts.num_lookahead_tokens
        self.max_total_tokens = min(
            max_model_len,
            (self.config.token_unit == 1)
            + max_request_tokens(
                groups,
                num_blocks - 1,
                max(self.config.max_num_batched_tokens, num_uncertain),
                block_size,
                max_model_len + self.config.max_excess_tokens,
                num_uncertain,
            )
            - self.config.max_excess_tokens,
        )
        self.worker = worker_class(self.config.diffusion)(
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=vocab_size,
            groups=groups,
            num_host_blocks=num_host_blocks,
            propose=propose,
            remembers_drafts=self.config.async_scheduling,
            most_drafts=speculative.num_speculative_tokens if speculative else 0,
        )
        for name in self.LOADED[: self.config.max_cpu_loras]:
            self._load_at_start(name)
        self.received: dict[Key, ClientView] = {}
        self._num_requests = 0
        self.stats: list[SchedulerStats] = []
        self.now = 0.0
        self.steps: list[SchedulerOutput] = []
        self.batch: dict[int, int] = {}
        self._in_flight: deque[SchedulerOutput] = deque()
        self._sequences: dict[int, int] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(EngineCoreOutputs).decode

    def _load_at_start(self, name: str) -> None:
        cache, lora = self.scheduler.loras, adapter(name)
        assert lora is not None
        cache.begin_load(lora, ())
        cache.release_all()
        (load,) = cache.take_loads()
        self.worker.loras[load.number] = name
        cache.end_load(load.number, is_loaded=True)

    def _make_scheduler(self) -> Scheduler:
        return self._setup.make_scheduler(
            self.grammar,
            log_kv_events=self._log_kv_events,
            kv_connector=self.connector,
            encoder_cache_connector=self._encoder_connector,
        )

    def lose_core(self) -> None:
        """Replace the core and lose its steps in flight. Clients resubmit their requests to the next one."""
        self._in_flight.clear()
        self._sequences.clear()
        self.batch = {}
        self.grammar = ModelGrammar(self.vocab_size, self.grammar.forces)
        held = self.worker.release_requests()
        self.scheduler = self._make_scheduler()
        self.scheduler.adopt_blocks(held)
        received, self.received = self.received, {}
        for (client, index), each in received.items():
            if each.is_over or each.was_aborted:
                each.is_over = True
                self.received[client, index] = each
                continue
            each.message = msgspec.structs.replace(
                each.message,
                request_index=self._next_index(),
                output_token_ids=int32_bytes(each.token_ids),
                is_resubmitted=True,
                was_index=index,
            )
            self.received[client, each.message.request_index] = each
            self.scheduler.add_request(client, each.message, self.now)
        for client in {client for client, _ in received}:
            self.scheduler.end_adoption(client)
        self.check()

    def _next_index(self) -> int:
        self._num_requests += 1
        return self._num_requests - 1

    # what a client does

    def add(
        self,
        prompt: list[int] | int,
        max_tokens: int | None = 8,
        *,
        client: int = 0,
        eos: tuple[int, ...] = (),
        salt: str | None = None,
        priority: int = 0,
        tenant: str = "",
        deadline: float = 0.0,
        lora_name: str = "",
        inputs: Sequence[EncoderInput] = (),
        kv_transfer_params: dict[str, object] | None = None,
        is_suspect: bool = False,
        trace_headers: dict[str, str] | None = None,
        predicted: list[int] | None = None,
        pooling_params: PoolingParams | None = None,
        delivery_times: bytes = b"",
        is_open: bool = False,
        **params: object,
    ) -> Key:
        """Send a request; `prompt` may be just a length."""
        token_ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
        lora = adapter(lora_name)
        root = root_hash(cache_salt=salt, lora_version=lora.version if lora else None)
        places = [(item.position, item.num_tokens, item.content_hash) for item in inputs]
        token_array = np.array(token_ids, np.int32)
        hashes = hash_blocks(
            token_array, self.block_size, root, places, self.cache_config.prefix_hash
        )
        message = EngineCoreRequest(
            request_index=self._next_index(),
            prompt_token_ids=int32_bytes(token_ids),
            sampling_params=SamplingParams(max_tokens=max_tokens, **params),
            arrival_time=self.now,
            eos_token_ids=eos,
            block_hashes=hashes,
            root_hash=root,
            priority=priority,
            tenant=tenant,
            deadline=deadline,
            lora=lora,
            encoder_inputs=list(inputs),
            kv_transfer_params=kv_transfer_params,
            is_suspect=is_suspect,
            trace_headers=trace_headers,
            predicted_token_ids=int32_bytes(predicted or []),
            pooling_params=pooling_params,
            delivery_times=delivery_times,
            is_open=is_open,
        )
        key = (client, message.request_index)
        self.received[key] = ClientView(message)
        self.scheduler.add_request(client, message, self.now)
        return key

    def abort(self, *keys: Key) -> None:
        for key in keys:
            self.received[key].was_aborted = True
        self.scheduler.finish_requests(keys, FinishReason.ABORT)

    def move(self, key: Key, other: Harness, replica: int) -> Key:
        """Let another replica continue a request of this one, which is `replica`, with the tokens received so far."""
        view = self.received[key]
        view.was_aborted = True
        self.scheduler.finish_requests([key], FinishReason.MOVED)
        name = request_name(*key, view.message.arrival_time)
        params = {"do_remote_prefill": True, "remote_request_id": name, "replica": replica}
        return other.resubmit(key[0], view, kv_transfer_params=params)

    def resubmit(self, client: int, view: ClientView, **fields: object) -> Key:
        """Send a request that another replica has begun, with the tokens received so far."""
        message = msgspec.structs.replace(
            view.message,
            request_index=self._next_index(),
            output_token_ids=int32_bytes(view.token_ids),
            is_resubmitted=True,
            **fields,
        )
        key = (client, message.request_index)
        self.received[key] = ClientView(message, list(view.token_ids))
        self.scheduler.add_request(client, message, self.now)
        return key

    def request(self, key: Key) -> Request:
        return self.scheduler.requests[key]

    def preempt(self, key: Key) -> None:
        """Preempt a running request immediately, as if too few blocks were free."""
        self.scheduler.lifecycle.preempt(self.request(key).slot, self.now)

    # what the core loop does

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests()

    def compile_grammars(self) -> None:
        for key in list(self.grammar.compiling):
            self.grammar.compiling.remove(key)
            self.scheduler.grammar_ready(key, None)

    def schedule(self) -> SchedulerOutput | None:
        self.now += 1.0
        step = self.scheduler.schedule(self.now)
        if step is not None:
            self._check_limits(step)
            self.steps.append(step)
            self._in_flight.append(step)
            self.worker.submit(step)
            if len(self._in_flight) == 1:
                self._send_bitmask()
        self.check()
        return step

    def update(self) -> None:
        step = self._in_flight.popleft()
        self.now += 1.0
        outputs = self.scheduler.update_from_output(step, self.worker.next_output(), self.now)
        assert sum(message.stats is not None for message in outputs.values()) <= 1
        self._receive(outputs)
        for number, error in self.worker.take_lora_answers():
            self.scheduler.lora_loaded(number, error)
        self._send_bitmask()
        self.check()

    def step(self) -> bool:
        """Fill the pipeline and process one output. Return False if there was nothing to do."""
        while len(self._in_flight) < self.max_in_flight and self.schedule() is not None:
            pass
        self._receive(self.scheduler.take_outputs(self.now))
        if not self._in_flight:
            return False
        self.update()
        return True

    def drain(self, max_steps: int = 10_000) -> None:
        """Run until all requests have ended."""
        for _ in range(max_steps):
            self.compile_grammars()
            if not self.step() and not self.grammar.compiling:
                break
        self.check_empty()

    def _send_bitmask(self) -> None:
        if self._in_flight and self._in_flight[0].grammar_slots and not self.worker.is_idle:
            step = self._in_flight[0]
            bitmask = self.scheduler.get_grammar_bitmask(step)
            forced = self.scheduler.get_forced_tokens(step)
            self.worker.submit_grammar(GrammarOutput(step.step, bitmask, forced))

    def _receive(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client, sent in outputs.items():
            message = self._decode(self._encode(sent))
            assert message.sequence == self._sequences.get(client, 0)
            self._sequences[client] = message.sequence + 1
            if message.stats is not None:
                self.stats.append(message.stats)
            indices = int32_view(message.request_indices).tolist()
            token_ids = int32_view(message.token_ids).tolist()
            counts = int32_view(message.num_tokens).tolist() or [1] * len(indices)
            assert sum(counts) == len(token_ids)
            tokens = iter(token_ids)
            for index, count in zip(indices, counts, strict=True):
                received = self.received[client, index]
                assert not received.is_over, "a token after the end"
                received.token_ids += [next(tokens) for _ in range(count)]
            for events in message.events:
                for event in events.split():
                    self.received[client, event.request_index].events.append(event)
            predictions = int32_view(message.prediction_counts).reshape(-1, 3).tolist()
            for index, num_accepted, num_rejected in predictions:
                self.received[client, index].num_accepted_predictions += num_accepted
                self.received[client, index].num_rejected_predictions += num_rejected
            over = int32_view(message.finished_set).tolist()
            for finished in message.finished:
                assert finished.request_index in over
                self.received[client, finished.request_index].finished = finished
            for index in over:
                assert not self.received[client, index].is_over, "a request ended twice"
                self.received[client, index].is_over = True

    # invariants

    def _check_limits(self, step: SchedulerOutput) -> None:
        slots = list(self.batch) if step.slots is None else int32_view(step.slots).tolist()
        self.batch = dict.fromkeys(slots, 1)
        for position, count in int32_view(step.chunks).reshape(-1, 2).tolist():
            self.batch[slots[position]] = count
        assert sum(self.batch.values()) <= self.config.max_num_batched_tokens
        assert self.scheduler.get_request_counts()[0] <= self.config.max_num_seqs
        inputs = {
            (slot, index): request.encoder_inputs[index].size
            for slot, index in int32_view(step.encoders.computed if step.encoders else b"")
            .reshape(-1, 2)
            .tolist()
            if (request := self.scheduler.slots.requests[slot]) is not None
            and not request.encoder_inputs[index].follows
        }
        config = self.config
        budget = config.max_num_encoder_input_tokens or config.max_num_batched_tokens
        assert sum(inputs.values()) <= budget

    def check(self) -> None:
        """Check invariants I1, I2 and I5 of the scheduler's state."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        assert scheduler.check_invariants() == []
        running = {slot: r for slot, r in enumerate(scheduler.slots.requests) if r is not None}
        assert len(running) == scheduler.get_request_counts()[0]
        ref_counts = np.zeros(manager.pool.num_blocks, np.int32)
        for slot, request in running.items():
            assert scheduler.requests[request.key] is request
            num_computed = int(scheduler.slots.num_computed_tokens[slot])
            lookahead = self.speculative.num_lookahead_tokens if self.speculative else 0
            needed = min(num_computed + lookahead, scheduler.slots.max_computed_tokens[slot])
            for group, tables in zip(manager.groups, manager.blocks, strict=True):
                table = np.array(tables[slot], np.int32)
                if group.kind is not AttentionKind.CROSS:
                    assert len(table) * self.block_size >= needed
                if group.kind is AttentionKind.FULL:
                    assert table.all()
                np.add.at(ref_counts, table[table != 0], 1)
        for tables in manager.reserved.values():
            for group, table in zip(manager.groups, tables, strict=True):
                assert 0 not in table or group.kind is not AttentionKind.FULL
                np.add.at(ref_counts, [block for block in table if block], 1)
        loras = {request.lora for request in running.values() if request.lora is not None}
        assert len(loras) <= self.config.max_loras
        assert ref_counts.tolist() == manager.pool.ref_counts.tolist()
        assert manager.pool.num_free == np.count_nonzero(ref_counts[1:] == 0)
        assert sum(self.worker.encoder_cache.values()) <= self.config.encoder_cache_capacity
        if self.worker.is_idle and not scheduler.has_finished_requests():
            assert self.worker.rows.keys() == running.keys()
            for slot, row in self.worker.rows.items():
                assert row.request_id == running[slot].key
                for group, tables in enumerate(manager.blocks):
                    # The next step reports the blocks that were freed since.
                    told = row.block_tables[group][: len(tables[slot])]
                    assert [
                        block and sent for block, sent in zip(tables[slot], told, strict=True)
                    ] == tables[slot]
                rejected = sum(
                    count
                    for output in self.worker.rejected
                    for rejecting, count in output
                    if rejecting is row
                )
                num_computed = scheduler.slots.num_computed_tokens[slot]
                assert row.num_computed_tokens == num_computed - rejected * (
                    not self.config.diffusion
                )
                num_expected = scheduler.slots.num_expected_tokens[slot]
                assert len(row.token_ids) == num_expected - rejected
                output = scheduler.slots.output_token_ids(slot).tolist()
                assert row.token_ids[row.num_prompt_tokens :][: len(output)] == output

    def check_empty(self) -> None:
        """Check that all state is free, no request was lost, and every output equals that of the request run alone."""
        scheduler = self.scheduler
        assert not scheduler.has_requests() and not self._in_flight
        assert scheduler.get_request_counts() == (0, 0)
        pool = scheduler.kv_cache_manager.pool
        assert pool.num_free == pool.num_blocks - 1
        assert not self.worker.rows
        assert not scheduler.kv_cache_manager.reserved
        assert not self.grammar.num_accepted
        assert scheduler.check_invariants() == []
        for received in self.received.values():
            assert received.is_over, "a request was lost"
            if received.reason in REFUSED:
                assert not received.token_ids
                continue
            if received.was_aborted or received.reason is FinishReason.ERROR:
                continue
            assert received.finished is not None
            expected = run_alone(
                received.message, max_total_tokens=self.max_total_tokens, vocab_size=self.vocab_size
            )
            if received.reason is FinishReason.EXPIRED:
                assert received.token_ids == expected[0][: len(received.token_ids)]
                continue
            assert (
                received.token_ids,
                received.finished.reason,
                received.finished.stop_reason,
            ) == expected


def admissions(harness: Harness) -> list[Key]:
    """Return every admission in order, resumptions included."""
    return [data.request_id for step in harness.steps for data in step.new_requests]


def preempted(harness: Harness, key: Key) -> int:
    return harness.received[key].num_events(EventKind.PREEMPTED)
