"""A scheduler that records every input and decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from functools import wraps
from typing import Any, Final, TypeVar, cast

import msgspec

from ...protocol.block_hash import HashBlocks, block_hasher
from ...protocol.config import (
    PROTOCOL_VERSION,
    CacheConfig,
    EngineConfig,
    KVTransferConfig,
    SchedulerConfig,
)
from ...protocol.errors import ConfigError
from ...protocol.kv_cache_groups import FULL_ATTENTION, KVCacheGroup, max_request_blocks
from ...protocol.kv_transfer.multi import with_ports_of_core
from ...protocol.messages import (
    AppendInputs,
    CoreReady,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from ...protocol.worker_messages import (
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerMemory,
)
from ..kv_cache.connector import BlockConnector, KVConnector, create_connector
from ..scheduler.features.encoder_cache_connector import EncoderCacheConnector
from ..scheduler.features.grammars import GrammarBackend
from ..scheduler.interface import SchedulerInterface
from ..scheduler.scheduler import Scheduler
from ..scheduler.scheduler_class import load_scheduler_class
from ..state.forwarded import forwarded
from ..state.request import RequestKey
from .content import growth_without_content, report_without_content
from .events import AddRequest, Call, Schedule, TakeOutputs, Update, without_tokens
from .external import AskedEncoderCacheConnector, AskedGrammars, ask_connector
from .log import EVENT_BYTES, LATE_FACTOR, EventLog

S = TypeVar("S", bound=SchedulerInterface)
Method = TypeVar("Method", bound=Callable[..., Any])

UNRECORDED: Final = "the error was not recorded"


class Setup(msgspec.Struct, frozen=True):
    """The arguments from which a scheduler is constructed, as stored in a dump."""

    config: SchedulerConfig
    cache_config: CacheConfig
    max_model_len: int
    vocab_size: int
    num_blocks: int
    core_index: int = 0
    has_grammars: bool = False
    num_host_blocks: int = 0
    kv_cache_groups: tuple[KVCacheGroup, ...] = FULL_ATTENTION
    kv_transfer: KVTransferConfig | None = None
    has_encoder_cache_connector: bool = False
    finds_blocks: bool = False
    polls_workers: bool = True

    @classmethod
    def from_config(cls, config: EngineConfig, memory: WorkerMemory, core_index: int) -> Setup:
        """Return the arguments of a core's scheduler."""
        return cls(
            config.scheduler,
            config.cache,
            max_model_len=config.model.max_model_len,
            vocab_size=config.model.vocab_size,
            num_blocks=memory.num_blocks,
            num_host_blocks=memory.num_host_blocks,
            kv_cache_groups=memory.groups,
            core_index=core_index,
            kv_transfer=config.kv_transfer and with_ports_of_core(config.kv_transfer, core_index),
        )

    def make_ready(self, engine: EngineConfig) -> CoreReady:
        """Return the message that says that the core is ready, with the size of its KV cache."""
        config, block_size = self.config, self.cache_config.block_size
        num_uncertain = config.max_uncertain_tokens
        request_blocks = max_request_blocks(
            self.kv_cache_groups,
            self.max_model_len + config.max_excess_tokens,
            max(config.max_num_batched_tokens, num_uncertain),
            block_size,
            num_uncertain,
        )
        return CoreReady(
            PROTOCOL_VERSION,
            engine.epoch,
            self.core_index,
            self.num_blocks,
            block_size,
            max_concurrency=self.num_blocks / request_blocks,
            weights=(engine.model.weights_id, engine.model.weight_version),
        )

    def make_scheduler(
        self,
        grammars: GrammarBackend | None = None,
        hash_blocks: HashBlocks | None = None,
        log_kv_events: bool = False,
        scheduler_class: Callable[..., Scheduler] | None = None,
        kv_connector: KVConnector | None = None,
        encoder_cache_connector: EncoderCacheConnector | None = None,
    ) -> Scheduler:
        """Construct a scheduler of the configured class, or of `scheduler_class` if given.

        Raises:
            ConfigError: Limits contradict each other, or the class cannot be recorded.
        """
        if scheduler_class is None:
            found = load_scheduler_class(self.config.scheduler_cls)
            if not issubclass(found, Scheduler):
                raise ConfigError(
                    f"--scheduler-cls {self.config.scheduler_cls} cannot be recorded, replayed or simulated: "
                    "it is not a subclass of engine.core.scheduler.scheduler.Scheduler"
                )
            scheduler_class = found
        return self.make(
            scheduler_class,
            grammars,
            hash_blocks,
            log_kv_events,
            kv_connector,
            encoder_cache_connector,
        )

    def make(
        self,
        scheduler_class: Callable[..., S],
        grammars: GrammarBackend | None = None,
        hash_blocks: HashBlocks | None = None,
        log_kv_events: bool = False,
        kv_connector: KVConnector | None = None,
        encoder_cache_connector: EncoderCacheConnector | None = None,
    ) -> S:
        """Call `scheduler_class` with all arguments. Errors that it raises are passed on."""
        return scheduler_class(
            self.config,
            self.cache_config,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            num_blocks=self.num_blocks,
            num_host_blocks=self.num_host_blocks,
            kv_cache_groups=self.kv_cache_groups,
            core_index=self.core_index,
            structured_output=grammars,
            log_kv_events=log_kv_events,
            hash_blocks=hash_blocks,
            kv_connector=kv_connector,
            kv_transfer=self.kv_transfer,
            encoder_cache_connector=encoder_cache_connector,
        )


def _recorded(method: Method, keep: Callable[..., tuple[Any, ...]] = lambda *args: args) -> Method:
    """Return a method that records a call, with the arguments that `keep` returns, and forwards it."""
    name = method.__name__

    @wraps(method, assigned=("__name__", "__doc__"), updated=())
    def call(self: RecordedScheduler, *args: Any) -> Any:
        self.log.add_event(Call(name, keep(*args)))
        return getattr(self.scheduler, name)(*args)

    return cast(Method, call)


def _without_text(about: Any, error: str | None) -> tuple[Any, str | None]:
    return about, error and UNRECORDED


class RecordedScheduler(SchedulerInterface):
    """A scheduler that constructs another one, forwards each call to it, and records in `log` what a replay needs.

    Args:
        setup: The arguments of the scheduler.
        structured_output: The grammar backend.
        log_kv_events: If true, the scheduler collects KV-cache events.
        kv_connector: The KV connector; by default the one that `setup` names.
        encoder_cache_connector: The encoder-cache connector.
        log: The event log; by default a new one.

    Raises:
        ConfigError: See `Setup.make_scheduler`.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        structured_output: GrammarBackend | None = None,
        log_kv_events: bool = False,
        kv_connector: KVConnector | None = None,
        encoder_cache_connector: EncoderCacheConnector | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.log = log = log or EventLog()
        if setup.kv_transfer is not None and kv_connector is None:
            kv_connector = create_connector(setup.kv_transfer)
        self.setup = msgspec.structs.replace(
            setup,
            has_grammars=structured_output is not None,
            has_encoder_cache_connector=encoder_cache_connector is not None,
            finds_blocks=isinstance(kv_connector, BlockConnector),
            polls_workers=kv_connector is None or kv_connector.polls_workers,
        )
        self.scheduler = setup.make_scheduler(
            structured_output and AskedGrammars(structured_output, log.ask),
            log.record_hashes(block_hasher(setup.cache_config.prefix_hash)),
            log_kv_events,
            kv_connector=kv_connector
            and ask_connector(kv_connector, log.ask, finds_blocks=self.setup.finds_blocks),
            encoder_cache_connector=encoder_cache_connector
            and AskedEncoderCacheConnector(encoder_cache_connector, log.ask),
        )
        self.invariant_violations = self.scheduler.invariant_violations

    # Inputs

    adopt_blocks = _recorded(SchedulerInterface.adopt_blocks, lambda held: (list(held),))
    end_adoption = _recorded(SchedulerInterface.end_adoption)
    add_client = _recorded(SchedulerInterface.add_client)
    finish_client = _recorded(SchedulerInterface.finish_client)
    make_stats = _recorded(SchedulerInterface.make_stats)
    grammar_ready = _recorded(SchedulerInterface.grammar_ready, _without_text)
    lora_loaded = _recorded(SchedulerInterface.lora_loaded, _without_text)
    update_draft_token_ids = _recorded(
        SchedulerInterface.update_draft_token_ids, lambda drafts: (without_tokens(drafts),)
    )

    def add_request(self, client_index: int, message: EngineCoreRequest, now: float) -> None:
        """Record and forward the call. The log drops content that no replay reads at the end of the turn."""
        num_bytes = len(message.prompt_token_ids)
        self.log.add_request(AddRequest(client_index, copy(message), num_bytes, now))
        self.scheduler.add_request(client_index, message, now)

    def append_inputs(self, client_index: int, message: AppendInputs) -> None:
        """Record and forward the call; media contents are not recorded."""
        num_bytes = sum(EVENT_BYTES + len(item.places) for item in message.inputs)
        args = client_index, growth_without_content(message)
        self.log.add_event(Call("append_inputs", args), num_bytes)
        self.scheduler.append_inputs(client_index, message)

    def finish_requests(
        self, keys: Iterable[RequestKey], reason: FinishReason, message: str = ""
    ) -> None:
        """Record and forward the call; the message is not recorded."""
        keys = list(keys)
        self.log.add_event(Call("finish_requests", (keys, reason)), 100 * len(keys))
        self.scheduler.finish_requests(keys, reason, message)

    def find_requests(self, request_id: str) -> list[RequestKey]:
        """Return the unfinished requests that have this ID, or all of them if it is ""."""
        requests = self.scheduler.requests.values()
        return [each.key for each in requests if request_id in ("", each.request_id)]

    def reset_prefix_cache(self, reset_running_requests: bool = False, now: float = 0.0) -> bool:
        """Record and forward the call."""
        self.log.add_event(Call("reset_prefix_cache", (reset_running_requests, now)))
        done = self.scheduler.reset_prefix_cache(reset_running_requests, now)
        self.log.record_result(done)
        return done

    def update_from_connector(self, rank: int, output: KVConnectorOutput, now: float) -> None:
        """Record and forward the call; the connector's data is not recorded."""
        args = rank, report_without_content(output), now
        self.log.add_event(Call("update_from_connector", args), len(output.invalid_block_ids))
        self.scheduler.update_from_connector(rank, output, now)

    @property
    def kv_connector(self) -> KVConnector | None:
        """The KV connector, if there is one."""
        return self.scheduler.kv_connector

    # Steps

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Record and forward the call. Begins a new segment of the log if `end_turn` has not done so for long."""
        log = self.log
        if log.num_bytes > LATE_FACTOR * log.segment_bytes:
            log.roll_over(self.scheduler)
        event = Schedule(now)
        log.events.append(event)
        step = self.scheduler.schedule(now)
        log.record_step(event, step)
        if step is not None:
            log.num_bytes += len(step.slots or b"") + len(step.block_updates)
            for data in step.new_requests:
                # At the first admission these bytes belong to the request, whose arrival counted them.
                if len(data.token_ids) > 4 * data.num_prompt_tokens:
                    log.num_bytes += len(data.token_ids)
        return step

    def end_turn(self) -> None:
        """Begin a new segment of the log if the last one is full. The workers have a step to run meanwhile."""
        self.log.end_turn(self.scheduler)
        self.scheduler.end_turn()

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        now: float,
    ) -> dict[int, EngineCoreOutputs]:
        """Record and forward the call; log-probabilities and pooled vectors are not recorded."""
        log = self.log
        result = model_runner_output
        if result.logprobs or result.prompt_logprobs or result.pooled or result.drafts is not None:
            result = copy(result)
            result.logprobs = result.prompt_logprobs = []
            result.pooled = []
            result.drafts = result.drafts and without_tokens(result.drafts)
        event = Update(now, result)
        log.add_update(event)
        outputs = self.scheduler.update_from_output(scheduler_output, model_runner_output, now)
        log.record_outputs(event, outputs)
        return outputs

    def take_outputs(self, now: float) -> dict[int, EngineCoreOutputs]:
        """Forward the call, and record it if there were outputs."""
        outputs = self.scheduler.take_outputs(now)
        if outputs:
            event = TakeOutputs(now)
            self.log.events.append(event)
            self.log.record_outputs(event, outputs)
        return outputs

    # Queries, which change nothing and are not recorded

    def describe_blocks(self) -> str:
        """Return a `BlockState` for each of at most `MAX_BLOCK_CELLS` KV-cache blocks."""
        return self.scheduler.kv_cache_manager.pool.describe_blocks()

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> bytes:
        """Return the token bitmasks of the step's constrained rows."""
        num_events = len(self.log.events)
        bitmask = self.scheduler.get_grammar_bitmask(scheduler_output)
        # No decision depends on the answers of grammars in this call, so they are not recorded.
        del self.log.events[num_events:]
        return bitmask

    def has_requests(self) -> bool:
        """Return whether there is anything to compute, or to send to the workers."""
        num_events, num_bytes = len(self.log.events), self.log.num_bytes
        has_requests = self.scheduler.has_requests()
        # No decision depends on the answers of the connector in this call, so they are not recorded.
        del self.log.events[num_events:]
        self.log.num_bytes = num_bytes
        return has_requests

    shutdown = forwarded(SchedulerInterface.shutdown, to="scheduler")
    get_kv_cache_usage = forwarded(SchedulerInterface.get_kv_cache_usage, to="scheduler")
    find_crash_suspects = forwarded(SchedulerInterface.find_crash_suspects, to="scheduler")
    get_forced_tokens = forwarded(SchedulerInterface.get_forced_tokens, to="scheduler")
    take_kv_events = forwarded(SchedulerInterface.take_kv_events, to="scheduler")
    get_num_unfinished_requests = forwarded(
        SchedulerInterface.get_num_unfinished_requests, to="scheduler"
    )
    has_finished_requests = forwarded(SchedulerInterface.has_finished_requests, to="scheduler")
    get_request_counts = forwarded(SchedulerInterface.get_request_counts, to="scheduler")


def make_core_scheduler(
    setup: Setup, grammars: GrammarBackend, *, log_kv_events: bool
) -> SchedulerInterface:
    """Construct the scheduler of a core. It is recorded if its class supports that.

    Raises:
        ConfigError: Limits contradict each other, or the class cannot be used.
    """
    scheduler_class = load_scheduler_class(setup.config.scheduler_cls)
    if issubclass(scheduler_class, Scheduler):
        return RecordedScheduler(setup, structured_output=grammars, log_kv_events=log_kv_events)
    connector = create_connector(setup.kv_transfer) if setup.kv_transfer is not None else None
    return setup.make(
        scheduler_class, grammars, log_kv_events=log_kv_events, kv_connector=connector
    )
