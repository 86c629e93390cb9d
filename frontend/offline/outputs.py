"""The results that the methods of `LLM` return."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..client.engine_client import Delta, RequestGroup
from ..client.logprobs import PositionLogprobs

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the n outputs of a prompt. `error` is the reason if `finish_reason` is "error" or "ignored"."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None

    @property
    def cumulative_logprob(self) -> float | None:
        """The logprob of the whole output; None if logprobs were not requested."""
        return None if self.logprobs is None else sum(p.logprob for p in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of one prompt in CLOCK_MONOTONIC seconds; 0.0 for events that did not occur.

    With several outputs, these are the first start and the last end. `scheduler_time` is the scheduler's computing time
    in seconds while the prompt was running; 0.0 if a stop string ended it.
    """

    arrival_time: float
    queued_time: float
    first_scheduled_time: float
    first_token_time: float
    last_token_time: float
    finished_time: float
    scheduler_time: float

    @property
    def time_in_queue(self) -> float:
        """Seconds from queueing the prompt until it was first scheduled."""
        return max(self.first_scheduled_time - self.queued_time, 0.0)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outputs of one prompt. `prompt` is None if it was given as token IDs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A result of a beam search.

    Attributes:
        tokens: The token IDs of the prompt and of the continuation.
        text: The generated text.
        cum_logprob: The sum of the log-probabilities of the generated tokens.
        finish_reason: "stop" after the end-of-sequence token, else "length".
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The results for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True)
class PooledOutput(Generic[T]):
    """The result of one prompt that was pooled, with the prompt's tokens."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: T


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one text."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The class probabilities of one text, and the name of the most probable class."""

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


class ClassificationRequestOutput(PooledOutput[ClassificationOutput]):
    """The classes of one prompt, with the prompt's tokens."""


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of one pair of texts."""

    score: float


class ScoringRequestOutput(PooledOutput[ScoringOutput]):
    """The score of a pair, with the tokens of both texts (only of the second one if texts are embedded separately)."""


class EmbeddingRequestOutput(PooledOutput[EmbeddingOutput]):
    """The embedding of one prompt, with the prompt's tokens."""


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The result of one text: a vector, or a vector for each token."""

    data: list[Any]


class PoolingRequestOutput(PooledOutput[PoolingOutput]):
    """The result of one prompt, with the prompt's tokens."""


def request_output(
    group: RequestGroup, prompt: str | None, prompt_token_ids: list[int], deltas: list[Delta]
) -> RequestOutput:
    """Return the output of a request that has ended."""
    return RequestOutput(
        request_id=group.request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=group.sequences[0].prompt_logprobs,
        outputs=[
            CompletionOutput(
                index,
                delta.text,
                delta.token_ids,
                None if delta.logprobs is None else list(delta.logprobs),
                delta.finish_reason,
                delta.stop_reason,
                delta.error,
            )
            for index, delta in enumerate(deltas)
        ],
        num_cached_tokens=group.sequences[0].num_cached_tokens,
        metrics=_request_metrics(group),
    )


def _request_metrics(group: RequestGroup) -> RequestMetrics:
    sequences = group.sequences

    def first(times: Iterable[float]) -> float:
        return min(filter(None, times), default=0.0)

    return RequestMetrics(
        arrival_time=sequences[0].arrival_time,
        queued_time=first(each.queued_time for each in sequences),
        first_scheduled_time=first(each.scheduled_time for each in sequences),
        first_token_time=first(each.first_token_time for each in sequences),
        last_token_time=max(each.last_token_time for each in sequences),
        finished_time=max(each.finish_time for each in sequences),
        scheduler_time=max(each.scheduler_time for each in sequences),
    )
