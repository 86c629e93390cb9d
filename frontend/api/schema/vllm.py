"""The request bodies of vLLM's own routes."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from . import Int


class GenerativeScoringRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /generative_scoring`, and of SGLang's `POST /v1/score`.

    Each item gets the probability of a label as the next token.
    """

    model: str | None = None
    query: str | list[Int] | None = None
    items: str | list[str | list[Int]] | None = None
    label_token_ids: list[Int] | None = None
    # If true, the probabilities of the labels add up to 1; else, they are the probabilities among all tokens. The
    # default is true, and false for `/v1/score`.
    apply_softmax: bool | None = None
    # True if an item precedes the query.
    item_first: bool | None = None
    # True if the query gets the special tokens of the tokenizer.
    add_special_tokens: bool | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    user: str | None = None

    # Accepted because clients send them; they have no effect.
    request_id: str | None = None

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = (
        "query_embed_overrides item_embed_overrides return_token_logprobs "
        "return_pooled_hidden_states score_extraction_token"
    )
