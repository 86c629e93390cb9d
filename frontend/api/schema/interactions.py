"""The request body of Google's Interactions API, with the fields of `google-genai` 3.6.1."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from . import Int


class InteractionConfig(msgspec.Struct, kw_only=True):
    """The field `generation_config`."""

    max_output_tokens: Int | None = None
    seed: Int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    thinking_level: str | None = None
    thinking_summaries: str | None = None
    tool_choice: str | dict[str, Any] | None = None

    # Refused, because the server writes only text.
    image_config: Any = None
    speech_config: Any = None
    transcription_config: Any = None
    video_config: Any = None


class InteractionRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1beta/interactions`."""

    model: str | None = None
    input: str | dict[str, Any] | list[dict[str, Any]] | None = None
    system_instruction: str | None = None
    previous_interaction_id: str | None = None
    generation_config: InteractionConfig | None = None
    response_format: dict[str, Any] | list[dict[str, Any]] | None = None
    response_mime_type: str | None = None
    response_modalities: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    labels: dict[str, str] | None = None

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = (
        "agent agent_config cached_content continuation_token environment webhook_config"
    )

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "safety_settings service_tier"
