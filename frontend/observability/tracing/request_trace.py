"""The data that is recorded about a request for its trace.

It has the same times and counts as metrics and receipts. They are copied when the last sequence of a group has
finished, and are turned into spans in another thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Final, NamedTuple, Protocol

import msgspec

from ....protocol.messages import FinishReason
from ....protocol.sampling_params import SamplingParams
from ..metrics.metrics import MeasuredSequence
from .context import TraceContext

MAX_SEQUENCES: Final = 16
"""Maximum sequences of a request that have spans. The token counts include all sequences."""


class Recovery(NamedTuple):
    """A crash that a sequence survived. Times are CLOCK_MONOTONIC seconds.

    Attributes:
        lost_time: The time at which the frontend lost the core.
        resumed_time: The time at which the next token arrived; 0.0 for none.
        num_tokens: The number of tokens that the sequence had.
    """

    lost_time: float
    resumed_time: float
    num_tokens: int


class TracedSequence(MeasuredSequence, Protocol):
    """The fields of a sequence that are recorded."""

    params: SamplingParams
    num_cached_tokens: int
    num_drafted_tokens: int
    finish_reason: FinishReason | None
    error: str | None
    recoveries: tuple[Recovery, ...]


class TracedGroup(Protocol):
    """The sequences of one request that were submitted together."""

    @property
    def sequences(self) -> Sequence[TracedSequence]:
        """The sequences of the group."""

    def outputs_by_prompt(self) -> Iterator[Sequence[TracedSequence]]:
        """Yield the sequences of each prompt."""


class SequenceRecord(msgspec.Struct, frozen=True):
    """The recorded data of a sequence. See `TracedSequence`."""

    core_index: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_drafted_tokens: int
    num_preemptions: int
    num_generated_tokens: int
    arrival_time: float
    scheduled_time: float
    first_token_time: float
    last_token_time: float
    finish_time: float
    recoveries: tuple[Recovery, ...]

    @classmethod
    def from_sequence(cls, sequence: TracedSequence) -> SequenceRecord:
        """Return the record of a finished sequence."""
        return cls(*(getattr(sequence, name) for name in cls.__struct_fields__))


class RequestTrace(msgspec.Struct):
    """The trace of one request.

    It is exported when the response and all of its groups of sequences have ended. Groups that begin later, such as
    those of a background response, have their own spans below the request's span.

    Attributes:
        context: The request's own span.
        export: Receives the complete record.
        parent_id: The span of the client; 0 for none.
        method: The HTTP method; "" for a part of a request that began after its response.
        status: The status of the response; 0 if none was sent.
        finish_reasons: The finish reason of each sequence.
        errors: The error messages of sequences that failed.
    """

    context: TraceContext
    export: Callable[[RequestTrace], None]
    parent_id: int = 0
    method: str = ""
    path: str = ""
    request_id: str = ""
    status: int = 0
    start_time: float = msgspec.field(default_factory=time.monotonic)
    end_time: float = 0.0
    lora_name: str = ""
    params: SamplingParams | None = None
    max_tokens: int | None = None
    num_sequences: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_token_time: float = 0.0
    finish_reasons: list[str] = msgspec.field(default_factory=list)
    errors: list[str] = msgspec.field(default_factory=list)
    sequences: list[SequenceRecord] = msgspec.field(default_factory=list)
    num_unfinished: int = 1
    """The number of groups that have not ended, plus 1 for the response."""

    def begin_group(self) -> RequestTrace:
        """Return the trace in which a group that begins now is recorded."""
        if self.num_unfinished:
            self.num_unfinished += 1
            return self
        return RequestTrace(
            self.context.new_child(),
            self.export,
            self.context.span_id,
            path=self.path,
            request_id=self.request_id,
        )

    def record_group(self, group: TracedGroup) -> None:
        """Record a group whose sequences have all finished."""
        first = group.sequences[0]
        self.lora_name, self.params = first.lora_name, first.params
        self.max_tokens = first.max_tokens
        self.num_sequences += len(group.sequences)
        for outputs in group.outputs_by_prompt():
            self.num_input_tokens += outputs[0].num_prompt_tokens
            self.num_cached_tokens += outputs[0].num_cached_tokens
        first_token_times = [self.first_token_time] if self.first_token_time else []
        for sequence in group.sequences:
            self.num_output_tokens += sequence.num_generated_tokens
            if sequence.first_token_time:
                first_token_times.append(sequence.first_token_time)
        self.first_token_time = min(first_token_times, default=0.0)
        shown = group.sequences[: MAX_SEQUENCES - len(self.sequences)]
        self.sequences += map(SequenceRecord.from_sequence, shown)
        self.finish_reasons += [str(sequence.finish_reason) for sequence in shown]
        self.errors += [sequence.error for sequence in shown if sequence.error]
        self._end_part()

    def end_response(self, path: str, request_id: str) -> None:
        """Record the end of the response."""
        self.path, self.request_id = path, request_id
        self.end_time = time.monotonic()
        self._end_part()

    def _end_part(self) -> None:
        self.num_unfinished -= 1
        if not self.num_unfinished:
            self.end_time = self.end_time or time.monotonic()
            self.export(self)


current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)
"""The trace of the request that is being answered; None if it is not traced."""


def begin_group() -> RequestTrace | None:
    """Return the trace in which a new group of the current request is recorded; None if the request is not traced."""
    trace = current_trace.get()
    return None if trace is None else trace.begin_group()


def end_recovery(recoveries: Iterable[Recovery], resumed_time: float) -> tuple[Recovery, ...]:
    """Return the recoveries of a sequence, the last of which ended at `resumed_time`."""
    *earlier, last = recoveries
    return (*earlier, last._replace(resumed_time=resumed_time))
