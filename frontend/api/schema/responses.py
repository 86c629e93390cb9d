"""The request bodies of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from . import CommonFields, Int


class ResponseFields(CommonFields, kw_only=True):
    """The fields that describe the prompt of a response.

    Those of the sampling are among them, so that a client can send the body of a response to be counted or compacted.
    """

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    # Its `context_compression` may not be "enabled".
    image: dict[str, Any] | None = None
    # Repeated in the answer; the prefixes of all prompts are cached. `prewarm` asks for no answer.
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # As in a chat.
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    use_audio_in_video: bool | None = None

    rejected: ClassVar[str] = "prompt"

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "access_programs client_metadata personality service_tier"


class InputTokensRequest(ResponseFields, kw_only=True):
    """The body of `POST /v1/responses/input_tokens`."""


class CompactRequest(ResponseFields, kw_only=True):
    """The body of `POST /v1/responses/compact`."""


class ResponsesRequest(ResponseFields, kw_only=True):
    """The body of `POST /v1/responses`."""

    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: Int | None = None
    # It limits calls of hosted tools only, and this server has none.
    max_tool_calls: Int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    top_logprobs: Int | None = None
    # The tenant. Ignored if the server has several API keys.
    user: str | None = None
    safety_identifier: str | None = None

    thinking_token_budget: Int | None = None
    # As in a chat.
    kv_transfer_params: dict[str, Any] | None = None
    # Adds the texts and the token ids of the prompt and of the answer to the response, as in vLLM.
    enable_response_messages: bool | None = None

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = (
        "context_management moderation vllm_xargs previous_response "
        "previous_input_messages include_reasoning "
        "ec_transfer_params watermarking bootstrap_host "
        "bootstrap_port bootstrap_room disagg_prefill_dp_rank"
    )

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "background_options session_id spaces_between_special_tokens"


class ResponseCreateRequest(ResponsesRequest, kw_only=True):
    """An event `response.create` on the WebSocket `/v1/responses`."""

    type: str | None = None
    generate: bool | None = None
    stream_id: str | None = None


SHARED_FIELDS = (*CommonFields.__struct_fields__, "thinking_token_budget", "kv_transfer_params")
"""Fields with the same name and meaning as in chat completions."""


class ConversationRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/conversations`, and of `POST /v1/conversations/{id}` without the items."""

    metadata: dict[str, str] | None = None
    items: list[dict[str, Any]] | None = None


class ConversationItemsRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/conversations/{id}/items`."""

    items: list[dict[str, Any]] | None = None
