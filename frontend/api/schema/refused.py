"""The fields of request bodies that are rejected, and those that are ignored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar, cast

import msgspec

from ...http.errors import bad_request, echo

T = TypeVar("T", bound=msgspec.Struct)

_PROBLEMS: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
        "is not supported; use kv_transfer_params of /v1/completions",
    ),
    "decode_tp_size": "is not supported; use kv_transfer_params of /v1/completions",
    "disagg_prefill_dp_rank": "is not supported; use kv_transfer_params of /v1/completions",
    "logits_processors": "is not supported; use logit_bias",
    "custom_logit_processor": "is not supported; use logit_bias",
    "suffix": "is not supported in chats; use /v1/completions",
    "prompt_embeds": "is not supported in chats; use /v1/completions",
    "moderation": "is not supported; this server does not moderate",
    "system": "is not supported; send it with a request",
    "template": "is not supported; start the server with --chat-template",
    "web_search_options": "is not supported; this server does not search the web",
    "prompt": "is not supported; this server has no prompt templates: send instructions and input",
    "context_management": "is not supported; use truncation auto",
    "previous_response": "is not supported; use previous_response_id, or send its items",
    "previous_input_messages": "is not supported; send items in input",
    "input_embeds": "is not supported; send prompt_embeds to /v1/completions",
    "session_params": "is not supported; use /generate",
    "beam_width": "is not supported; use use_beam_search of /v1/completions",
    "max_thinking_tokens": "is not supported; use thinking_token_budget of /v1/chat/completions",
    "multi_item_delimiter_indices": "is not supported; use /v1/score",
    "task": "is not supported; write the task into a message",
    "container": "is not supported; this server runs no tools itself",
    "compaction": "is not supported; ask for a summary in a message",
    "_debug_render_only": "has no effect on this route; use /v1/chat/completions/render or /v1/completions/render",
    "cachedContent": "names no stored content; send it in contents, whose beginning is cached",
    "joint": "is not supported; each question is answered by itself",
    "thinking_token_budget": "is not supported; use /v1/chat/completions",
    "include_reasoning": "is not supported; skip the items of type reasoning",
    "early_stopping": "is not supported; a beam search ends when no beam can become better",
    "return_token_logprobs": "is not supported; use /v1/completions with logprob_token_ids",
    "return_input_ids_in_sglext": "is not supported; use return_token_ids",
    "return_output_ids_in_sglext": "is not supported; use return_token_ids",
    "agent": "is not supported; this server runs models, not agents: send model",
    "agent_config": "is not supported; this server runs models, not agents",
    "cached_content": "is not supported; send the content in input",
    "continuation_token": "is not supported; use previous_interaction_id",
    "environment": "is not supported; this server runs no tools",
    "webhook_config": "is not supported; use background and get",
    "features": "is not supported; send media to /v1/chat/completions",
    "content_parts": "is not supported; send media to /v1/chat/completions",
    "use_beam_search": "is not supported for speech",
    "length_penalty": "is not supported for speech",
    "include_stop_str_in_output": "is not supported for speech",
    "n": "is not supported for speech; send several requests",
    "known_speaker_names": "is not supported; speakers are named A, B, …",
    "known_speaker_references": "is not supported; speakers are named A, B, …",
}
"""Rejected field -> the rest of the error message, if there is something to do instead."""

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "watermarking": (False, "", "false", "False", "0"),
    "mirostat": (0,),
    "beam_width": (1,),
    "routed_experts_start_len": (0,),
    "routed_experts_prompt_start": (0,),
    "include_reasoning": (True,),
    # An empty object counts, too.
    **dict.fromkeys(("web_search_options", "compaction", "previous_response"), ()),
    # The values of forms are texts.
    "use_beam_search": ("false", "False", "0"),
    "n": ("1",),
    "length_penalty": ("1", "1.0"),
    "include_stop_str_in_output": ("false", "False", "0"),
}
"""Rejected field -> the values without an effect, if they are others than false and `_EMPTY`."""

_EMPTY: Final[tuple[Any, ...]] = ("", [], {})


def refused_fields(schema: type[msgspec.Struct]) -> list[str]:
    """Return the fields that the schema rejects: those that it or a base names in `rejected`, and none accepts."""
    return _named(schema, "rejected")


def ignored_fields(schema: type[msgspec.Struct]) -> list[str]:
    """Return the fields without an effect: those that the schema or a base names in `ignored`, and none accepts."""
    return _named(schema, "ignored")


def _named(schema: type[msgspec.Struct], attribute: str) -> list[str]:
    found = [name for each in schema.__mro__ for name in vars(each).get(attribute, "").split()]
    return [name for name in dict.fromkeys(found) if name not in schema.__struct_encode_fields__]


def with_all_fields(schema: type[T]) -> type[T]:
    """Return the schema with its ignored fields and its rejected ones, which may have any value."""
    names = dict.fromkeys([*refused_fields(schema), *ignored_fields(schema)])
    fields = [(name, Any, None) for name in names]
    own = {"__doc__": schema.__doc__}
    found = msgspec.defstruct(schema.__name__, fields, bases=(schema,), namespace=own, kw_only=True)
    return cast(type[T], found)


def verify_supported(request: msgspec.Struct, names: Iterable[str], where: str = "") -> None:
    """Raise APIError 400 if one of the fields `names`, which the schema rejects, has a value with an effect.

    `where` is put before the name of the field in the error.
    """
    for name in names:
        if (value := getattr(request, name)) is None:
            continue
        accepted = _NEUTRAL.get(name)
        if not (value in _EMPTY or value is False if accepted is None else value in accepted):
            problem = _PROBLEMS.get(name, "is not supported; leave it out")
            raise bad_request(where + name, f"{problem}, got {echo(value)}")
