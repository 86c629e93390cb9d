"""The interface between the core loop and a scheduler; `--scheduler-cls` may name another implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from ...protocol.kv_events import KVCacheEvent
from ...protocol.messages import (
    AppendInputs,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)
from ...protocol.worker_messages import (
    DraftTokenIds,
    HeldRequest,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from ..kv_cache.connector import KVConnector
from ..state.request import RequestKey
from .features.poison_isolation import CrashSuspects


class SchedulerInterface(ABC):
    """A pure state machine that decides what each step computes.

    Its only clock is the argument `now`, in seconds of CLOCK_MONOTONIC. Steps may be scheduled
    before the outputs of earlier ones arrive. Outputs arrive in the order of the steps.
    """

    invariant_violations: list[str]
    """Descriptions of violated invariants. The core loop logs them and empties the list."""

    @abstractmethod
    def adopt_blocks(self, held: Sequence[HeldRequest]) -> None:
        """Keep the blocks of requests that a previous core left in the workers' KV cache.

        A request that its client submits again continues with them. The core calls this before any other method.
        """

    @abstractmethod
    def end_adoption(self, client_index: int) -> None:
        """Release the adopted blocks that no resubmitted request of a client has claimed."""

    @abstractmethod
    def add_client(self, client_index: int) -> None:
        """Prepare to send outputs to a client. The client with the lowest index also receives the statistics."""

    @abstractmethod
    def finish_client(self, client_index: int) -> None:
        """Abort all requests of a client that has disconnected, and send it nothing more."""

    @abstractmethod
    def add_request(self, client_index: int, message: EngineCoreRequest, now: float) -> None:
        """Queue a request. A request that can never run finishes immediately, with the reason."""

    @abstractmethod
    def finish_requests(
        self, keys: Iterable[RequestKey], reason: FinishReason, message: str = ""
    ) -> None:
        """Finish requests before their last token. Unknown and finished ones are ignored."""

    def find_requests(self, request_id: str) -> list[RequestKey]:
        """Return the unfinished requests that have this ID, or all of them if it is ""; [] if unknown."""
        return []

    @abstractmethod
    def get_kv_cache_usage(self) -> float:
        """Return the fraction of KV-cache blocks in use, from 0 to 1."""

    def describe_blocks(self) -> str:
        """Return one `BlockState` character for each of at most `MAX_BLOCK_CELLS` KV-cache blocks; "" if unknown."""
        return ""

    @abstractmethod
    def find_crash_suspects(self) -> CrashSuspects:
        """Return the requests in the steps in flight.

        If a worker crashes before it returns their output, one of them may be the cause.
        """

    @abstractmethod
    def append_inputs(self, client_index: int, message: AppendInputs) -> None:
        """Append encoder inputs to an open request. Ignore those that it already has."""

    @abstractmethod
    def grammar_ready(self, key: RequestKey, error: str | None) -> None:
        """Record that the grammar of a request is compiled, or failed to compile with `error`."""

    @abstractmethod
    def lora_loaded(self, number: int, error: str | None) -> None:
        """Record that all workers have answered a `LoraLoad`.

        If it failed with `error`, finish the requests of the adapter.
        """

    @abstractmethod
    def schedule(self, now: float) -> SchedulerOutput | None:
        """Decide the next step. Return None if there is nothing to compute and nothing to send to the workers."""

    @abstractmethod
    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> bytes:
        """Return the token bitmasks of the step's `grammar_slots`.

        The core calls this when the outputs of all earlier steps have been applied.
        """

    @abstractmethod
    def get_forced_tokens(self, scheduler_output: SchedulerOutput) -> DraftTokenIds | None:
        """Return the tokens that grammars force after the last tokens of the step's `grammar_slots`.

        The core calls this after `get_grammar_bitmask`.
        """

    @abstractmethod
    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        now: float,
    ) -> dict[int, EngineCoreOutputs]:
        """Apply the output of the oldest step in flight. Return the messages to each client.

        Raises:
            EngineError: The output belongs to another step, or its arrays have the wrong shape.
        """

    def update_from_connector(  # noqa: B027
        self, rank: int, output: KVConnectorOutput, now: float
    ) -> None:
        """Apply a report of the worker side of the KV connector that arrived without a step output.

        The transfers that it lists have ended in all workers. Its `data` comes from worker `rank`.
        """

    @property
    def kv_connector(self) -> KVConnector | None:
        """The scheduler side of the KV connector, if there is one."""
        return None

    @abstractmethod
    def update_draft_token_ids(self, drafts: DraftTokenIds) -> None:
        """Apply drafts that arrived separately, after the output of the step that was applied last.

        Raises:
            EngineError: The arrays have the wrong shape, or scheduling is asynchronous, which requires drafts to arrive
                with the output.
        """

    @abstractmethod
    def take_outputs(self, now: float) -> dict[int, EngineCoreOutputs]:
        """Return the messages to each client about requests that finished outside of a step."""

    @abstractmethod
    def take_kv_events(self) -> list[KVCacheEvent]:
        """Return the KV-cache events since the last call; empty unless they are enabled."""

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Return the number of waiting and running requests."""

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Return whether slots were freed that no step message has reported to the workers yet."""

    @abstractmethod
    def has_requests(self) -> bool:
        """Return whether there is anything to compute, or to send to the workers."""

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """Return the numbers of running and of waiting requests, in this order."""

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False, now: float = 0.0) -> bool:
        """Remove all cached prefixes.

        Return False, and change nothing, while any block is in use.
        """

    @abstractmethod
    def make_stats(self) -> SchedulerStats:
        """Return the current gauges, and the counts since the last call."""

    def end_turn(self) -> None:  # noqa: B027
        """Do work that no step waits for. The core calls this after it has sent all messages of a turn."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release external resources. The scheduler is not used afterwards."""
