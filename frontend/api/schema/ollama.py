"""The request bodies of Ollama's API."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from . import Int


class OllamaOptions(msgspec.Struct, kw_only=True):
    """The options of a request. Those of Ollama's runner have no effect."""

    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Int | None = None
    num_predict: Int | None = None
    stop: str | list[str] | None = None

    # Rejected unless they have the value without an effect.
    mirostat: float | None = None
    tfs_z: float | None = None


class OllamaFields(msgspec.Struct, kw_only=True):
    """The fields that chat and completion requests share."""

    model: str | None = None
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None

    # With an empty prompt, 0 unloads the model if the server may sleep, and other values load it.
    keep_alive: float | str | None = None

    # Accepted because clients send them; they have no effect. A prompt that is too long is refused, and a full context
    # ends the answer.
    ignored: ClassVar[str] = "truncate shift"

    # Rejected, because an answer that ignores it would be wrong.
    rejected: ClassVar[str] = "_debug_render_only"


class OllamaChatRequest(OllamaFields, kw_only=True):
    """The body of `POST /api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """The body of `POST /api/generate`."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    # The tokens of an earlier answer. Ollama deprecates this field in favor of /api/chat.
    context: list[Int] | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /api/embed`, and (with `prompt`) of the older `POST /api/embeddings`."""

    model: str | None = None
    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: Int | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "options keep_alive"


class OllamaModelRequest(msgspec.Struct, kw_only=True):
    """The body of the routes that name one model, such as `POST /api/show`."""

    model: str | None = None
    # The older name of `model`.
    name: str | None = None
    stream: bool | None = None
    verbose: bool | None = None
    insecure: bool | None = None
    options: dict[str, Any] | None = None

    # Rejected, because the description would not show them.
    rejected: ClassVar[str] = "system template"


class OllamaCopyRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /api/copy`."""

    source: str | None = None
    destination: str | None = None
