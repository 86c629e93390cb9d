"""The prompts of models that read all documents of a query at once (jina-reranker-v3), and the scores they return.

Shapes: T tokens of a prompt, N documents, D elements of a token's vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...protocol.arrays import Int32Array
from ...protocol.config.model import RankingConfig
from ..tokenizer.tokenizer import Tokenizer

_BEGIN: Final = (
    "<|im_start|>system\n"
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to "
    "the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If "
    "not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking.<|im_end|>\n"
    "<|im_start|>user\n"
)
_END: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The prompt with which the model was trained, before and after the documents and the query."""


def ranking_texts(
    ranking: RankingConfig,
    queries: Sequence[str],
    documents: Sequence[str],
    instruction: str | None,
) -> list[str]:
    """Return a prompt of all documents for a single query, else one for each query and its document."""
    if len(queries) == 1:
        return [_prompt(ranking, queries[0], documents, instruction)]
    pairs = zip(queries, documents, strict=True)
    return [_prompt(ranking, query, [document], instruction) for query, document in pairs]


def _prompt(
    ranking: RankingConfig, query: str, documents: Sequence[str], instruction: str | None
) -> str:
    def plain(text: str) -> str:
        """Return a text without the tokens whose vectors are compared."""
        marks = (ranking.document_token, ranking.query_token)
        while any(mark in text for mark in marks):
            for mark in marks:
                text = text.replace(mark, "")
        return text

    wanted = plain(query)
    lines = [
        f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. "
        f"Rank the passages based on their relevance to query: {wanted}"
    ]
    if instruction:
        lines.append(f"<instruct>\n{plain(instruction)}\n</instruct>")
    lines += [
        f'<passage id="{i}">\n{plain(each)}{ranking.document_token}\n</passage>'
        for i, each in enumerate(documents)
    ]
    lines.append(f"<query>\n{wanted}{ranking.query_token}\n</query>")
    return _BEGIN + "\n".join(lines) + _END


def ranking_scores(
    ranking: RankingConfig,
    pooled: Iterable[tuple[Int32Array, NDArray[Any]]],
    tokenizer: Tokenizer,
) -> list[float]:
    """Return the cosine of the vectors of each document and of its query.

    `pooled` has the tokens of each prompt and their vectors [T, D].
    """
    marks = [tokenizer.token_to_id(each) for each in (ranking.document_token, ranking.query_token)]
    scores: list[float] = []
    for token_ids, rows_TD in pooled:
        documents_ND, query_1D = (rows_TD[token_ids == mark].astype(np.float64) for mark in marks)
        norms_N = np.linalg.norm(documents_ND, axis=1) * np.linalg.norm(query_1D)
        scores += ((documents_ND @ query_1D[0]) / np.maximum(norms_N, 1e-12)).tolist()
    return scores
