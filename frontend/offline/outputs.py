"""The results that the methods of `LLM` return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...protocol.arrays import Float32Array
from ..client.embeddings import LateChunkingMetadata
from ..client.engine_client import Delta, RequestGroup
from ..client.groups.hidden_states import StatesInMemory
from ..client.logprobs import PositionLogprobs
from ..client.prompt_candidates import candidate_scores, without_candidates
from ..tokenizer.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Logprob:
    """The logprob of a token, its rank from 1, and its text (None if the output has no text)."""

    logprob: float
    rank: int
    decoded_token: str | None


class TokenLogprobs(Mapping[int, Logprob]):
    """The logprobs of one position. As in vLLM, it is also a mapping from token IDs, with the sampled token.

    Attributes:
        token_id: The sampled token.
        logprob: Its logprob.
        rank: Its rank, from 1.
        top: Pairs of token ID and logprob, the most likely first.
    """

    __slots__ = ("_entries", "_tokenizer", "logprob", "rank", "token_id", "top")

    def __init__(self, position: PositionLogprobs, tokenizer: Tokenizer | None) -> None:
        self.token_id, self.logprob = position.token_id, position.logprob
        self.rank, self.top = position.rank, position.top
        self._tokenizer = tokenizer
        self._entries: dict[int, Logprob] | None = None

    def __getitem__(self, token_id: int) -> Logprob:
        return self._by_id()[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_id())

    def __len__(self) -> int:
        return len(self._by_id())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._by_id()})"

    def _by_id(self) -> dict[int, Logprob]:
        if self._entries is None:
            ranked = [(self.token_id, self.logprob, self.rank)]
            ranked += [(token_id, value, i) for i, (token_id, value) in enumerate(self.top, 1)]
            decode = _no_text if self._tokenizer is None else self._tokenizer.decode
            self._entries = {
                token_id: Logprob(
                    value, self.rank if token_id == self.token_id else i, decode([token_id])
                )
                for token_id, value, i in ranked
            }
        return self._entries


def _no_text(_: Iterable[int]) -> None:
    return None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the n outputs of a prompt. `error` is the reason if `finish_reason` is "error" or "ignored".

    `hidden_states` are those of prompt and output but its last token, float32 [tokens, elements], or of one token with
    "last"; None unless they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    hidden_states: Float32Array | None = None

    def finished(self) -> bool:
        """Return whether the output has ended."""
        return self.finish_reason is not None

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
    """The outputs of one prompt. `prompt` is None if it was given as token IDs.

    `prompt_token_id_logprobs` are the scores of candidates, float32 [rows, candidates], if they were asked for.
    `kv_transfer_params` has the path of the prompt's hidden states, if the engine writes them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_token_id_logprobs: Float32Array | None = None
    kv_transfer_params: dict[str, object] | None = None

    @property
    def finished(self) -> bool:
        """True if all outputs have ended."""
        return all(output.finished() for output in self.outputs)


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

    @property
    def hidden_size(self) -> int:
        """The number of elements."""
        return len(self.embedding)


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


@dataclass(frozen=True)
class PoolingRequestOutput(PooledOutput[PoolingOutput]):
    """The result of one prompt, with the prompt's tokens. `late_chunking` are the chunks if they were asked for."""

    late_chunking: LateChunkingMetadata | None = None


def request_output(
    group: RequestGroup,
    prompt: str | None,
    prompt_token_ids: list[int],
    deltas: list[Delta],
    tokenizer: Tokenizer | None,
) -> RequestOutput:
    """Return the output of a request. Tokens have no text without a tokenizer."""
    first, positions, scores = group.sequences[0], None, None
    if first.params.prompt_logprobs is not None:
        positions = list(first.iterate_prompt_logprobs())
        if (candidates := first.params.prompt_candidates) is not None:
            scores = candidate_scores(positions, candidates)
            positions = list(without_candidates(positions, candidates))

    def named(positions: Iterable[PositionLogprobs | None] | None) -> list[Any] | None:
        if positions is None:
            return None
        return [None if each is None else TokenLogprobs(each, tokenizer) for each in positions]

    return RequestOutput(
        request_id=group.request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=named(positions),
        outputs=[
            CompletionOutput(
                index,
                delta.text,
                delta.token_ids,
                named(delta.logprobs),
                delta.finish_reason,
                delta.stop_reason,
                delta.error,
                states.rows()
                if delta.finish_reason and isinstance(states, StatesInMemory)
                else None,
            )
            for index, (delta, states) in enumerate(
                zip(deltas, (sequence.states for sequence in group.sequences), strict=True)
            )
        ],
        num_cached_tokens=group.sequences[0].num_cached_tokens,
        metrics=_request_metrics(group),
        prompt_token_id_logprobs=scores,
        kv_transfer_params=group.sequences[0].kv_transfer_params,
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
