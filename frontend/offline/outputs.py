"""The results of the calls of `LLM`."""

from __future__ import annotations

from dataclasses import dataclass

from ..client.logprobs import PositionLogprobs


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
    """The times of one prompt in CLOCK_MONOTONIC seconds; 0.0 for events that did not happen.

    With several outputs, the first start and the last end are given. `scheduler_time` is the number of seconds that the
    scheduler worked while the prompt was running, or 0.0 if a stop string ended it.
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
        tokens: The prompt's token IDs and the generated ones.
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


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one text."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The probabilities of the classes of one text, and the name of the likeliest class."""

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """The classes of one prompt, with the prompt's tokens."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of one pair of texts."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of a pair, with the tokens of both texts, or only of the second one if each is embedded by itself."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt, with the prompt's tokens."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
