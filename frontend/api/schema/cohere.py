"""The request bodies of Cohere's API."""

from __future__ import annotations

from typing import Any, ClassVar

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


class CohereChatRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v2/chat`."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    stream: bool | None = None
    max_tokens: Int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    seed: Int | None = None
    # Top-k and top-p.
    k: Int | None = None
    p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logprobs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    strict_tools: bool | None = None
    # REQUIRED or NONE.
    tool_choice: str | None = None
    # Texts, or objects with `data` and `id`.
    documents: list[str | dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    # Fields of Engine, as in chat completions.
    priority: Int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "citation_options safety_mode"
