"""A scheduler that records every input and decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import TypeVar

import msgspec

from ...protocol.block_hash import HashBlocks, block_hasher
from ...protocol.config import CacheConfig, KVTransferConfig, SchedulerConfig
from ...protocol.errors import ConfigError
from ...protocol.kv_cache_groups import FULL_ATTENTION, KVCacheGroup
from ...protocol.kv_events import KVCacheEvent
from ...protocol.messages import (
    DraftTokenIds,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    HeldRequest,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from ..kv_cache.connector import KVConnector, create_connector
from ..scheduler.features.encoder_cache_connector import EncoderCacheConnector
from ..scheduler.features.grammars import GrammarBackend
from ..scheduler.features.poison_isolation import CrashSuspects
from ..scheduler.interface import SchedulerInterface
from ..scheduler.scheduler import Scheduler
from ..scheduler.scheduler_class import load_scheduler_class
from ..state.request import RequestKey
from .connectors import RecordedEncoderCacheConnector, RecordedKVConnector
from .events import (
    AddClient,
    AddRequest,
    AdoptBlocks,
    EndAdoption,
    FinishClient,
    FinishRequests,
    GrammarReady,
    MakeStats,
    ResetPrefixCache,
    Schedule,
    TakeOutputs,
    Update,
    UpdateDrafts,
    without_tokens,
)
from .log import EventLog, RecordedGrammars

S = TypeVar("S", bound=SchedulerInterface)


class Setup(msgspec.Struct, frozen=True):
    """What a scheduler is made with."""

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

    def make_scheduler(
        self,
        grammars: GrammarBackend | None = None,
        hash_blocks: HashBlocks | None = None,
        log_kv_events: bool = False,
        scheduler_class: Callable[..., Scheduler] | None = None,
        kv_connector: KVConnector | None = None,
        encoder_cache_connector: EncoderCacheConnector | None = None,
    ) -> Scheduler:
        """Make a scheduler of the configured class, or of the given one.

        Raises ConfigError for limits that contradict each other, and for a class that cannot be recorded.
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
        """Call the class with everything that it is made with. Raises what it raises."""
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


class RecordedScheduler(SchedulerInterface):
    """Hands everything to the `scheduler` it makes, and notes in `log` what a replay needs."""

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
        """Without a `kv_connector` it is the one that the setup names. Raises ConfigError as `make_scheduler` does."""
        self.log = log = log or EventLog()
        self.setup = msgspec.structs.replace(
            setup,
            has_grammars=structured_output is not None,
            has_encoder_cache_connector=encoder_cache_connector is not None,
        )
        if setup.kv_transfer is not None and kv_connector is None:
            kv_connector = create_connector(setup.kv_transfer)
        self._kv_connector = kv_connector
        self.scheduler = setup.make_scheduler(
            structured_output and RecordedGrammars(structured_output, log),
            log.recording(block_hasher(setup.cache_config.prefix_hash)),
            log_kv_events,
            kv_connector=kv_connector and RecordedKVConnector(kv_connector, log),
            encoder_cache_connector=encoder_cache_connector
            and RecordedEncoderCacheConnector(encoder_cache_connector, log),
        )
        self.invariant_violations = self.scheduler.invariant_violations

    # inputs

    def adopt_blocks(self, held: Sequence[HeldRequest]) -> None:
        self.log.events.append(AdoptBlocks(list(held)))
        self.scheduler.adopt_blocks(held)

    def end_adoption(self, client_index: int) -> None:
        self.log.events.append(EndAdoption(client_index))
        self.scheduler.end_adoption(client_index)

    def add_client(self, client_index: int) -> None:
        self.log.events.append(AddClient(client_index))
        self.scheduler.add_client(client_index)

    def finish_client(self, client_index: int) -> None:
        self.log.events.append(FinishClient(client_index))
        self.scheduler.finish_client(client_index)

    def add_request(self, client_index: int, message: EngineCoreRequest, now: float) -> None:
        kept = message
        if message.encoder_inputs:
            kept = copy(message)
            kept.encoder_inputs = [
                msgspec.structs.replace(item, data=b"") for item in message.encoder_inputs
            ]
        self.log.add(AddRequest(client_index, kept, len(message.prompt_token_ids), now))
        self.scheduler.add_request(client_index, message, now)

    def grammar_ready(self, key: RequestKey, error: str | None) -> None:
        self.log.events.append(GrammarReady(key, error is None))
        self.scheduler.grammar_ready(key, error)

    def finish_requests(
        self, keys: Iterable[RequestKey], reason: FinishReason, message: str = ""
    ) -> None:
        keys = list(keys)
        self.log.events.append(FinishRequests(keys, reason))
        self.log.num_bytes += 100 * len(keys)
        self.scheduler.finish_requests(keys, reason, message)

    def reset_prefix_cache(self, reset_running_requests: bool = False, now: float = 0.0) -> bool:
        self.log.events.append(ResetPrefixCache(reset_running_requests, now))
        done = self.scheduler.reset_prefix_cache(reset_running_requests, now)
        self.log.answered(done)
        return done

    def make_stats(self) -> SchedulerStats:
        self.log.events.append(MakeStats())
        return self.scheduler.make_stats()

    def update_draft_token_ids(self, drafts: DraftTokenIds) -> None:
        self.log.events.append(UpdateDrafts(without_tokens(drafts)))
        self.scheduler.update_draft_token_ids(drafts)

    def shutdown(self) -> None:
        self.scheduler.shutdown()

    # steps

    def schedule(self, now: float) -> SchedulerOutput | None:
        log = self.log
        if log.num_bytes > log.segment_bytes:
            log.roll_over(self.scheduler)
        event = Schedule(now)
        log.events.append(event)
        step = self.scheduler.schedule(now)
        log.scheduled(event, step)
        if step is not None:
            log.num_bytes += len(step.slots or b"") + len(step.kv_connector_metadata)
            for data in step.new_requests:
                # The first time these are the very bytes that came with the request.
                if len(data.token_ids) > 4 * data.num_prompt_tokens:
                    log.num_bytes += len(data.token_ids)
        return step

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        now: float,
    ) -> dict[int, EngineCoreOutputs]:
        log = self.log
        result = model_runner_output
        if result.logprobs or result.prompt_logprobs or result.drafts is not None:
            result = copy(result)
            result.logprobs = result.prompt_logprobs = []
            result.drafts = result.drafts and without_tokens(result.drafts)
        event = Update(now, result)
        log.update(event)
        outputs = self.scheduler.update_from_output(scheduler_output, model_runner_output, now)
        log.told(event, outputs)
        return outputs

    def take_outputs(self, now: float) -> dict[int, EngineCoreOutputs]:
        outputs = self.scheduler.take_outputs(now)
        if outputs:
            event = TakeOutputs(now)
            self.log.events.append(event)
            self.log.told(event, outputs)
        return outputs

    # what changes nothing

    def get_kv_cache_usage(self) -> float:
        return self.scheduler.get_kv_cache_usage()

    def find_crash_suspects(self) -> CrashSuspects:
        return self.scheduler.find_crash_suspects()

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> bytes:
        num_events = len(self.log.events)
        bitmask = self.scheduler.get_grammar_bitmask(scheduler_output)
        # Answers of grammars in here decide nothing, so that a replay need not have them.
        del self.log.events[num_events:]
        return bitmask

    def get_forced_tokens(self, scheduler_output: SchedulerOutput) -> DraftTokenIds | None:
        return self.scheduler.get_forced_tokens(scheduler_output)

    def take_kv_events(self) -> list[KVCacheEvent]:
        return self.scheduler.take_kv_events()

    def get_kv_connector(self) -> KVConnector | None:
        return self._kv_connector

    def has_requests(self) -> bool:
        return self.scheduler.has_requests()

    def get_num_unfinished_requests(self) -> int:
        return self.scheduler.get_num_unfinished_requests()

    def has_finished_requests(self) -> bool:
        return self.scheduler.has_finished_requests()

    def get_request_counts(self) -> tuple[int, int]:
        return self.scheduler.get_request_counts()


def make_core_scheduler(
    setup: Setup, grammars: GrammarBackend, *, log_kv_events: bool
) -> SchedulerInterface:
    """Make the scheduler of a core, with an event log if its class can have one.

    Raises ConfigError for limits that contradict each other, and for a class that cannot be used.
    """
    scheduler_class = load_scheduler_class(setup.config.scheduler_cls)
    if issubclass(scheduler_class, Scheduler):
        return RecordedScheduler(setup, structured_output=grammars, log_kv_events=log_kv_events)
    connector = create_connector(setup.kv_transfer) if setup.kv_transfer is not None else None
    return setup.make(
        scheduler_class, grammars, log_kv_events=log_kv_events, kv_connector=connector
    )
