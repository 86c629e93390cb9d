"""Scores of candidates in place of each token of a prompt, by which vLLM's clients distill models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from ...protocol.arrays import Float32Array, int32_bytes, int32_view
from ...protocol.errors import ParameterError
from ...protocol.sampling_params import PromptCandidates
from .logprobs import PositionLogprobs

_NAME: Final = "prompt_logprob_token_ids"
_LARGEST: Final = 2**31 - 1


def parse_candidates(
    given: Sequence[Any], start: int, num_prompt_tokens: int, vocab_size: int, most: int
) -> PromptCandidates:
    """Return a list of candidates for each token of the prompt after `start` + 1, or one list for all of them.

    Raises:
        ParameterError: The candidates are invalid; see `verify_candidates`.
    """
    num_rows = num_prompt_tokens - 1 - start
    is_row = [isinstance(row, Sequence) for row in given]
    if any(is_row) != all(is_row):
        raise ParameterError(_NAME, "must have either lists or token ids")
    rows = given if any(is_row) else [given] * max(num_rows, 1)
    candidates = candidate_rows(rows, start)
    verify_candidates(candidates, num_prompt_tokens, vocab_size, most)
    return candidates


def candidate_rows(rows: Sequence[Sequence[int]], start: int) -> PromptCandidates:
    """Return candidates with -1 where a row is shorter than others. Ids that are not int32 become the largest one."""
    longest = max(map(len, rows), default=0)
    padded = np.full((len(rows), longest), -1, np.int64)
    for row, token_ids in zip(padded, rows, strict=True):
        row[: len(token_ids)] = token_ids
    return PromptCandidates(start, longest, int32_bytes(padded.clip(-2, _LARGEST)))


def verify_candidates(
    candidates: PromptCandidates, num_prompt_tokens: int, vocab_size: int, most: int
) -> None:
    """Raise ParameterError for candidates that the prompt cannot have.

    Args:
        candidates: The candidates.
        num_prompt_tokens: The number of tokens of the prompt.
        vocab_size: The number of tokens of the vocabulary.
        most: The maximum number of candidates of a row; -1 for the vocabulary.
    """
    first, longest = candidates.first, candidates.num_tokens
    num_rows = num_prompt_tokens - 1 - first
    if first < 0 or num_rows < 1:
        raise ParameterError(
            "prompt_logprob_start",
            f"must be between 0 and {num_prompt_tokens - 2}, two less than the prompt has tokens; got {first}",
        )
    most = vocab_size if most < 0 else most
    if not 1 <= longest <= most:
        raise ParameterError(
            _NAME,
            f"must have 1 to {most} tokens for each token of the prompt (--max-logprobs), got {longest}",
        )
    token_ids = int32_view(candidates.token_ids)
    if len(token_ids) != num_rows * longest:
        raise ParameterError(
            _NAME,
            f"must have a list for each of the {num_rows} scored tokens of the prompt, "
            f"got {len(token_ids) // longest}",
        )
    if (bad := token_ids[(token_ids < -1) | (token_ids >= vocab_size)]).size:
        raise ParameterError(
            _NAME, f"must be -1 or in the vocabulary [0, {vocab_size}), got {bad[0]}"
        )


def candidate_scores(
    positions: Sequence[PositionLogprobs | None], candidates: PromptCandidates
) -> Float32Array:
    """Return the log-probabilities of candidates, float32 [rows, candidates]; -inf for candidates of -1.

    `positions` are those of the prompt, whose last alternatives are the candidates.
    """
    ids_RK = int32_view(candidates.token_ids).reshape(-1, candidates.num_tokens)
    scores_RK = np.full(ids_RK.shape, -np.inf, np.float32)
    for row, position in zip(scores_RK, positions[candidates.first + 1 :], strict=True):
        assert position is not None
        row[:] = [logprob for _, logprob in position.top[-len(row) :]]
    scores_RK[ids_RK < 0] = -np.inf
    return scores_RK


def without_candidates(
    positions: Iterable[PositionLogprobs | None], candidates: PromptCandidates
) -> Iterator[PositionLogprobs | None]:
    """Yield positions without the candidates among their alternatives."""
    for each in positions:
        top = [] if each is None else each.top[: -candidates.num_tokens]
        yield None if each is None else msgspec.structs.replace(each, top=top)
