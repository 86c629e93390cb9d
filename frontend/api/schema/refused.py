"""The fields of request bodies that are rejected, and those that are ignored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar, cast

import msgspec

from ...http.errors import bad_request, echo

T = TypeVar("T", bound=msgspec.Struct)

_NOT_SUPPORTED = "is not supported; leave it out"
_MEDIA = "is not supported; send media to /v1/chat/completions"
_TRANSFER = "is not supported; use kv_transfer_params of /v1/completions"

REFUSED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "logits_processors": ("is not supported; use logit_bias", ([],)),
    "vllm_xargs": (_NOT_SUPPORTED, ({},)),
    "mm_processor_kwargs": (_NOT_SUPPORTED, ({},)),
    "media_io_kwargs": (_NOT_SUPPORTED, ({},)),
    "watermarking": (_NOT_SUPPORTED, (False, "false", "False", "0")),
    "ec_transfer_params": (_NOT_SUPPORTED, ()),
    "lora_path": (_NOT_SUPPORTED, ("",)),
    "custom_logit_processor": ("is not supported; use logit_bias", ("",)),
    "mirostat": (_NOT_SUPPORTED, (0,)),
    "suffix": ("is not supported in chats; use /v1/completions", ("",)),
    "prompt_embeds": ("is not supported in chats; use /v1/completions", ()),
    "system": ("is not supported; send it with a request", ("",)),
    "template": ("is not supported; start the server with --chat-template", ("",)),
    "audio": (_NOT_SUPPORTED, ()),
    "web_search_options": ("is not supported; this server does not search the web", ()),
    "prompt": (
        "is not supported; this server has no prompt templates: send instructions and input",
        (),
    ),
    "context_management": ("is not supported; use truncation auto", ([],)),
    "previous_response": ("is not supported; use previous_response_id, or send its items", ()),
    "previous_input_messages": ("is not supported; send items in input", ()),
    "custom_params": (_NOT_SUPPORTED, ({},)),
    "input_embeds": ("is not supported; send prompt_embeds to /v1/completions", ()),
    "return_routed_experts": (_NOT_SUPPORTED, (False,)),
    "return_entropy": (_NOT_SUPPORTED, (False,)),
    "session_params": ("is not supported; use /generate", ({},)),
    "beam_width": ("is not supported; use use_beam_search of /v1/completions", (1,)),
    "max_thinking_tokens": (
        "is not supported; use thinking_token_budget of /v1/chat/completions",
        (),
    ),
    "return_flat_raw_top_logprobs": (_NOT_SUPPORTED, (False,)),
    "routed_experts_start_len": (_NOT_SUPPORTED, (0,)),
    "return_indexer_topk": (_NOT_SUPPORTED, (False,)),
    "positional_embed_overrides": (_NOT_SUPPORTED, ()),
    "multi_item_delimiter_indices": ("is not supported; use /v1/score", ()),
    "token_indices_to_pool": (_NOT_SUPPORTED, ()),
    "task": ("is not supported; write the task into a message", ()),
    "bootstrap_host": (_TRANSFER, ()),
    "bootstrap_port": (_TRANSFER, ()),
    "bootstrap_room": (_TRANSFER, ()),
    "bootstrap_pair_key": (_TRANSFER, ()),
    "decode_tp_size": (_TRANSFER, ()),
    "disagg_prefill_dp_rank": (_TRANSFER, ()),
    "container": ("is not supported; this server runs no tools itself", ()),
    "compaction": ("is not supported; ask for a summary in a message", ()),
    "_debug_render_only": (
        "has no effect on this route; use /v1/chat/completions/render or /v1/completions/render",
        (False,),
    ),
    "cachedContent": (
        "names no stored content; send it in contents, whose beginning is cached",
        ("",),
    ),
    "joint": ("is not supported; each question is answered by itself", (False,)),
    "thinking_token_budget": ("is not supported; use /v1/chat/completions", ()),
    "kv_transfer_params": ("is not supported; use /v1/chat/completions", ({},)),
    "extra_key": ("is not supported; use cache_salt", ("",)),
    "include_reasoning": ("is not supported; skip the items of type reasoning", (True,)),
    "return_weight_versions": (_NOT_SUPPORTED, (False,)),
    "early_stopping": (
        "is not supported; a beam search ends when no beam can become better",
        (False,),
    ),
    "late_chunking_params": (
        "is not supported; average the vectors of /pooling with task token_embed",
        (),
    ),
    "embed_overrides": (_NOT_SUPPORTED, ()),
    "query_embed_overrides": (_NOT_SUPPORTED, ()),
    "item_embed_overrides": (_NOT_SUPPORTED, ()),
    "return_token_logprobs": (
        "is not supported; use /v1/completions with logprob_token_ids",
        (False,),
    ),
    "return_pooled_hidden_states": (_NOT_SUPPORTED, (False,)),
    "score_extraction_token": (_NOT_SUPPORTED, ()),
    "watermark": (_NOT_SUPPORTED, ({},)),
    "images_config": (_NOT_SUPPORTED, ({},)),
    "video_config": (_NOT_SUPPORTED, ({},)),
    "max_dynamic_patch": (_NOT_SUPPORTED, ()),
    "min_dynamic_patch": (_NOT_SUPPORTED, ()),
    "use_audio_in_video": (_NOT_SUPPORTED, (False,)),
    "return_spec_tokens_details": (_NOT_SUPPORTED, (False,)),
    "return_input_ids_in_sglext": ("is not supported; use return_token_ids", (False,)),
    "return_output_ids_in_sglext": ("is not supported; use return_token_ids", (False,)),
    "return_sampling_mask": (_NOT_SUPPORTED, (False,)),
    "sampling_logprobs_mode": (_NOT_SUPPORTED, ()),
    "return_flat_raw_output_top_logprobs": (_NOT_SUPPORTED, (False,)),
    "return_flat_raw_top_logprobs_b64": (_NOT_SUPPORTED, (False,)),
    "extra_args": (_NOT_SUPPORTED, ({},)),
    "routed_experts_prompt_start": (_NOT_SUPPORTED, (0,)),
    "trace_decode_token_ids": (_NOT_SUPPORTED, ()),
    "agent": ("is not supported; this server runs models, not agents: send model", ()),
    "agent_config": ("is not supported; this server runs models, not agents", ({},)),
    "cached_content": ("is not supported; send the content in input", ("",)),
    "continuation_token": ("is not supported; use previous_interaction_id", ("",)),
    "environment": ("is not supported; this server runs no tools", ({}, "")),
    "webhook_config": ("is not supported; use background and get", ({},)),
    "features": (_MEDIA, ()),
    "content_parts": (_MEDIA, ([],)),
    # The values of forms are texts.
    "use_beam_search": ("is not supported for speech", ("false", "False", "0")),
    "n": ("is not supported for speech; send several requests", ("1",)),
    "length_penalty": ("is not supported for speech", ("1", "1.0")),
    "known_speaker_names": ("is not supported; speakers are named A, B, …", ()),
    "known_speaker_references": ("is not supported; speakers are named A, B, …", ()),
    "include_stop_str_in_output": ("is not supported for speech", ("false", "False", "0")),
}
"""Rejected field -> the rest of the error message, and the values that are accepted, because they have no effect."""


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
        value = getattr(request, name)
        problem, accepted = REFUSED[name]
        if value is not None and value not in accepted:
            raise bad_request(where + name, f"{problem}, got {echo(value)}")
