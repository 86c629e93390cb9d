"""The request bodies of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from . import Int


class ToolChoice(msgspec.Struct, kw_only=True):
    """The tool calls that the answer may have."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """The settings of reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """A JSON schema for the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """The settings of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


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
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    metadata: dict[str, Any] | None = None
    # Servers whose tools the server calls itself, if it was started with them.
    mcp_servers: list[dict[str, Any]] | None = None

    # Fields of Engine, as in chat completions.
    priority: Int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = "container compaction ec_transfer_params vllm_xargs watermarking"
    thread: dict[str, Any] | None = None

    # Accepted because clients send them; they have no effect. No model declines a request here.
    ignored: ClassVar[str] = (
        "betas billing_policy cache_control context_management diagnostics "
        "fallback_credit_token fallbacks inference_geo service_tier speed user_profile_id "
        "workspace_id"
    )


class MessageBatchRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/messages/batches`."""

    requests: list[dict[str, Any]] | None = None
