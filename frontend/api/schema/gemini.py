"""The request bodies of Google's Gemini API. Fields have names in camel case or in snake case, as in Google's JSON."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from . import Int


class GeminiRequest(msgspec.Struct, kw_only=True):
    """The body of `generateContent` and `streamGenerateContent`."""

    contents: list[dict[str, Any]] | dict[str, Any] | str | None = None
    tools: list[dict[str, Any]] | None = None
    system: dict[str, Any] | str | None = msgspec.field(name="systemInstruction", default=None)
    tool_config: dict[str, Any] | None = msgspec.field(name="toolConfig", default=None)
    config: dict[str, Any] | None = msgspec.field(name="generationConfig", default=None)

    # The same fields in snake case.
    snake_system: dict[str, Any] | str | None = msgspec.field(
        name="system_instruction", default=None
    )
    snake_tool_config: dict[str, Any] | None = msgspec.field(name="tool_config", default=None)
    snake_config: dict[str, Any] | None = msgspec.field(name="generation_config", default=None)

    # Accepted because clients send them; they have no effect.
    model: str | None = None
    ignored: ClassVar[str] = "labels safetySettings safety_settings serviceTier store"

    # Rejected, because the content would be missing in the prompt.
    rejected: ClassVar[str] = "cachedContent"

    def __post_init__(self) -> None:
        self.system = self.snake_system if self.system is None else self.system
        self.config = self.snake_config if self.config is None else self.config
        if self.tool_config is None:
            self.tool_config = self.snake_tool_config


class GeminiCountRequest(GeminiRequest, kw_only=True):
    """The body of `countTokens`: contents, or a whole request."""

    request: GeminiRequest | None = msgspec.field(name="generateContentRequest", default=None)


class GeminiEmbedRequest(msgspec.Struct, kw_only=True):
    """The body of `embedContent`."""

    content: dict[str, Any] | str | None = None
    task_type: str | None = msgspec.field(name="taskType", default=None)
    title: str | None = None
    dimensions: Int | None = msgspec.field(name="outputDimensionality", default=None)

    # Accepted because clients send them; they have no effect.
    model: str | None = None
    ignored: ClassVar[str] = "autoTruncate"


class GeminiBatchEmbedRequest(msgspec.Struct, kw_only=True):
    """The body of `batchEmbedContents`."""

    requests: list[GeminiEmbedRequest] | None = None

    # Accepted because clients send it; it has no effect.
    model: str | None = None
