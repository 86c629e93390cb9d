"""The request body of OpenAI's Decisions API."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from . import QueueFields


class DecisionChoice(msgspec.Struct, kw_only=True):
    """An option of a question of type `choice`."""

    value: str | bool
    description: str | None = None


class DecisionLevel(msgspec.Struct, kw_only=True):
    """A level of a question of type `score`. The levels are in ascending order."""

    label: str
    description: str | None = None


class DecisionQuestion(msgspec.Struct, kw_only=True):
    """A question about the input: `predicate`, `choice` or `score`."""

    type: str
    # A text, or parts of type `input_text`, `input_image` or `input_json`.
    instructions: str | list[dict[str, Any]]
    name: str | None = None
    choices: list[DecisionChoice] | None = None
    levels: list[DecisionLevel] | None = None


class DecisionRequest(QueueFields, kw_only=True):
    """The body of `POST /v1/decisions`."""

    # A text, or items of the Responses API. Messages may have parts of type `input_json`.
    input: str | list[dict[str, Any]] | None = None
    questions: list[DecisionQuestion] | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "safety_identifier prompt_cache_key prompt_cache_options"

    # Rejected, because only diffusion models can answer questions jointly.
    rejected: ClassVar[str] = "joint"


class SystemOneRequest(QueueFields, kw_only=True):
    """The body of `POST /v1/systemone`, TypeSafe's form of decisions, which vLLM, llama.cpp and Ollama also serve."""

    # What the questions are about: a text, messages, or any JSON.
    state: Any = None
    # Name -> question: an object with `type`, `instructions` and `criteria`.
    questions: dict[str, dict[str, Any]] | None = None
    # A system message before the state.
    instructions: str | None = None
    # Variables of the chat template.
    chat_template_kwargs: dict[str, Any] | None = None
    # Images as data URLs.
    images: list[str] | None = None
    # Rejected if not empty, as videos are.
    audio: list[Any] | None = None
    videos: list[Any] | None = None
