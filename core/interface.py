"""What the core loop asks of a scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from ..protocol.kv_events import KVCacheEvent
from ..protocol.messages import (
    DraftTokenIds,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    HeldRequest,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from .kv_connector import KVConnector
from .quarantine import Accused
from .request import RequestKey


class SchedulerInterface(ABC):
    """A pure state machine: `now` (CLOCK_MONOTONIC seconds) is its only clock.

    Steps may be scheduled before the outputs of earlier ones are back; outputs come back in order.
    """

    violations: list[str]
    """Sums of blocks and requests that did not add up, in words. The core loop reports them and empties the list."""

    @abstractmethod
    def inherit(self, held: Sequence[HeldRequest]) -> None:
        """Keep the blocks of an earlier core's requests for those that come again. Called before all else."""

    @abstractmethod
    def end_inheritance(self, client_index: int) -> None:
        """All requests of a client have come again: give up what none of them goes on with."""

    @abstractmethod
    def add_client(self, client_index: int) -> None:
        """Get ready to send outputs to a client; the lowest index receives the statistics."""

    @abstractmethod
    def finish_client(self, client_index: int) -> None:
        """Abort all requests of a client that is gone, and send it nothing more."""

    @abstractmethod
    def add_request(self, client_index: int, message: EngineCoreRequest, now: float) -> None:
        """Queue a request. One that can never run ends at once, with the reason."""

    @abstractmethod
    def finish_requests(
        self, keys: Iterable[RequestKey], reason: FinishReason, message: str = ""
    ) -> None:
        """End requests from outside. Unknown and finished ones are passed over."""

    @abstractmethod
    def get_kv_cache_usage(self) -> float:
        """The share of the blocks in use, 0 to 1."""

    @abstractmethod
    def find_accused(self) -> Accused:
        """The requests in the steps in flight: one of them is the cause if their output never comes."""

    @abstractmethod
    def grammar_ready(self, key: RequestKey, error: str | None) -> None:
        """The grammar of a request is compiled, or it never will be."""

    @abstractmethod
    def schedule(self, now: float) -> SchedulerOutput | None:
        """Decide the next step; None when there is nothing to compute and nothing to tell."""

    @abstractmethod
    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> bytes:
        """Bitmasks of the step's `grammar_slots`, once the outputs of all earlier steps are in."""

    @abstractmethod
    def get_forced_tokens(self, scheduler_output: SchedulerOutput) -> DraftTokenIds | None:
        """Tokens that grammars force after the last ones of the step's `grammar_slots`. Called after its bitmasks."""

    @abstractmethod
    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        now: float,
    ) -> dict[int, EngineCoreOutputs]:
        """Take in the oldest step's output. Returns what each client is to be told.

        Raises EngineError when the output does not belong to that step or has not its shape.
        """

    @abstractmethod
    def update_draft_token_ids(self, drafts: DraftTokenIds) -> None:
        """Drafts that did not come with the output of the step, which is the last one taken in.

        Raises EngineError when they have not their shape, and with asynchronous scheduling, under which drafts
        come with the output.
        """

    @abstractmethod
    def take_outputs(self, now: float) -> dict[int, EngineCoreOutputs]:
        """What clients must hear of requests that ended outside of any step."""

    @abstractmethod
    def take_kv_events(self) -> list[KVCacheEvent]:
        """What happened to cached blocks since the last call; empty unless that is logged."""

    @abstractmethod
    def get_num_unfinished_requests(self) -> int: ...

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Whether slots were vacated that the workers have not been told of."""

    @abstractmethod
    def has_requests(self) -> bool:
        """Whether there is anything to compute, or to tell the workers."""

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False, now: float = 0.0) -> bool:
        """Forget cached prefixes; False, and nothing done, while blocks are in use."""

    @abstractmethod
    def make_stats(self) -> SchedulerStats:
        """Gauges now, and counts since the last call."""

    @abstractmethod
    def get_kv_connector(self) -> KVConnector | None:
        """The scheduler's half of the KV connector, if there is one."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release what the scheduler holds. It is not used afterwards."""
