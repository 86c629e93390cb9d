"""The request body of Mistral's API for completions that fill in the middle."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from .. import Int, StreamOptions


class MistralFimRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/fim/completions`."""

    model: str | None = None
    prompt: str | None = None
    # The text after the answer, for models that fill in the middle.
    suffix: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Tokens of the answer; by default as many as fit into the context.
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    stop: str | list[str] | None = None
    random_seed: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "metadata prompt_cache_key"
