"""The request bodies of Cohere's API."""

from __future__ import annotations

from typing import Any

import msgspec

from . import Int


class CohereContent(msgspec.Struct, kw_only=True):
    """An input that may have several parts: texts and images."""

    content: list[dict[str, Any]]


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v2/embed`."""

    model: str | None = None
    # One of these three.
    texts: list[str] | None = None
    images: list[str] | None = None
    inputs: list[CohereContent] | None = None
    input_type: str | None = None
    embedding_types: list[str] | None = None
    output_dimension: Int | None = None
    # END if absent.
    truncate: str | None = None
    max_tokens: Int | None = None
    priority: Int | None = None
