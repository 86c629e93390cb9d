"""Score all documents of a query in one prompt, which the model reads at once (jina-reranker-v3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....protocol.config.model import RankingConfig
from ...chat.list_ranking import ranking_texts
from ...http.errors import bad_request
from ..prompts import Prompt


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
    param = documents[0].param.partition("[")[0]
    texts = ranking_texts(
        ranking,
        [each.text or "" for each in queries],
        [each.text or "" for each in documents],
        instruction,
    )
    return [Prompt(param, text, np.empty(0, np.int32)) for text in texts]
