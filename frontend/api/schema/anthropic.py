"""The request bodies of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from . import Int


class MessagesRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/messages`, and of `POST /v1/messages/count_tokens` without the sampling fields."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: Int | None = None
    system: str | list[dict[str, Any]] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    # Servers whose tools the server calls itself, if it was started with them.
    mcp_servers: list[dict[str, Any]] | None = None

    # Fields of Engine, as in chat completions.
    priority: Int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = (
        "container compaction kv_transfer_params ec_transfer_params vllm_xargs watermarking"
    )
    thread: dict[str, Any] | None = None

    # Accepted because clients send them; they have no effect.
    betas: list[str] | None = None
    billing_policy: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    fallback_credit_token: str | dict[str, Any] | None = None
    # No model declines a request here.
    fallbacks: str | list[dict[str, Any]] | None = None
    inference_geo: str | None = None
    service_tier: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessageBatchRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/messages/batches`."""

    requests: list[dict[str, Any]] | None = None
