"""Score all documents of a query in one prompt, which the model reads at once (jina-reranker-v3).

Shapes: T tokens of a prompt, N documents, D elements of a token's vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ....protocol.config.model import RankingConfig
from ...client.engine_client import RequestGroup
from ...http.errors import bad_request
from ...tokenizer.tokenizer import Tokenizer
from ..prompts import Prompt

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


def ranking_prompts(
    ranking: RankingConfig,
    queries: Sequence[Prompt],
    documents: Sequence[Prompt],
    instruction: str | None,
) -> list[Prompt]:
    """Return a prompt of all documents for a single query, else one for each query and its document.

    Raises:
        APIError: One of them is not a text (400).
    """
    for each in (*queries, *documents):
        if each.text is None:
            raise bad_request(each.param, "must be a text, because this model reads only text")
    if len(queries) == 1:
        return [_prompt(ranking, queries[0], documents, instruction)]
    pairs = zip(queries, documents, strict=True)
    return [_prompt(ranking, query, [document], instruction) for query, document in pairs]


def _prompt(
    ranking: RankingConfig,
    query: Prompt,
    documents: Sequence[Prompt],
    instruction: str | None,
) -> Prompt:
    def plain(text: str | None) -> str:
        """Return a text without the tokens whose vectors are compared."""
        marks = (ranking.document_token, ranking.query_token)
        text = text or ""
        while any(mark in text for mark in marks):
            for mark in marks:
                text = text.replace(mark, "")
        return text

    wanted = plain(query.text)
    lines = [
        f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. "
        f"Rank the passages based on their relevance to query: {wanted}"
    ]
    if instruction:
        lines.append(f"<instruct>\n{plain(instruction)}\n</instruct>")
    lines += [
        f'<passage id="{i}">\n{plain(each.text)}{ranking.document_token}\n</passage>'
        for i, each in enumerate(documents)
    ]
    lines.append(f"<query>\n{wanted}{ranking.query_token}\n</query>")
    text = _BEGIN + "\n".join(lines) + _END
    return Prompt(documents[0].param.partition("[")[0], text, np.empty(0, np.int32))


def ranking_scores(
    ranking: RankingConfig, group: RequestGroup, prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> list[float]:
    """Return the cosine of the vectors of each document and of its query, for prompts whose tokens have vectors."""
    marks = [tokenizer.token_to_id(each) for each in (ranking.document_token, ranking.query_token)]
    scores: list[float] = []
    for sequence, prompt in zip(group.sequences, prompts, strict=True):
        rows_TD = np.frombuffer(sequence.pooled, np.float32).reshape(len(prompt.token_ids), -1)
        documents_ND, query_1D = (
            rows_TD[prompt.token_ids == mark].astype(np.float64) for mark in marks
        )
        norms_N = np.linalg.norm(documents_ND, axis=1) * np.linalg.norm(query_1D)
        scores += ((documents_ND @ query_1D[0]) / np.maximum(norms_N, 1e-12)).tolist()
    return scores
