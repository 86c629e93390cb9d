"""Scores of `LLM` by models that read all documents of a query in one prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...protocol.config.model import RankingConfig
from ...protocol.errors import ParameterError
from ..chat.list_ranking import ranking_scores, ranking_texts
from ..client.embeddings import Vector
from ..tokenizer.tokenizer import Tokenizer
from .outputs import ScoringOutput, ScoringRequestOutput
from .prompts import EncodedPrompt, PromptEncoder


class ListPrompts(NamedTuple):
    """The parts that prompts with several documents need: the model's settings and the encoders of texts."""

    ranking: RankingConfig
    encoder: PromptEncoder
    tokenizer: Tokenizer


def score_in_lists(
    lists: ListPrompts,
    given: tuple[list[Any], list[Any]],
    instruction: str | None,
    pool: Callable[[list[EncodedPrompt]], tuple[str, list[Vector]]],
) -> list[ScoringRequestOutput]:
    """Score documents in one prompt for a single query, else in one for each query and its document.

    Args:
        lists: How the model reads lists.
        given: The queries and the documents.
        instruction: A part of the prompt.
        pool: Returns the ID of a request and the vectors of each prompt's tokens.

    Raises:
        ParameterError: A query or a document is not a text.
    """
    for name, texts in zip(("text_1", "text_2"), given, strict=True):
        if not all(isinstance(text, str) for text in texts):
            raise ParameterError(name, "must be texts, because this model reads only text")
    queries, documents = given
    if not documents:
        return []
    texts = ranking_texts(lists.ranking, queries, documents, instruction)
    prompts = [lists.encoder.encode_pooled(text) for text in texts]
    request_id, pooled = pool(prompts)
    token_ids = (np.array(prompt.token_ids, np.int32) for prompt in prompts)
    rows = zip(token_ids, map(np.asarray, pooled), strict=True)
    scores = ranking_scores(lists.ranking, rows, lists.tokenizer)
    of_scores = prompts if len(prompts) == len(scores) else prompts * len(scores)
    return [
        ScoringRequestOutput(request_id, prompt.token_ids, ScoringOutput(score))
        for prompt, score in zip(of_scores, scores, strict=True)
    ]
