"""The request bodies of llama.cpp's own routes."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from ...model_source.lora_registry import LoraScale
from . import Int, SamplerFields


class LlamaFields(SamplerFields, kw_only=True):
    """The fields that completions and infills share."""

    model: str | None = None
    stream: bool | None = None
    # -1 is the rest of the context, and the default. 0 only computes the prompt, so that its blocks are cached.
    n_predict: Int | None = None
    max_tokens: Int | None = None
    n_cmpl: Int | None = None
    n: Int | None = None
    # llama.cpp's name of `repetition_penalty`.
    repeat_penalty: float | None = None
    # 0 turns all penalties off but that of `dry_multiplier`. All other values mean the whole context.
    repeat_last_n: Int | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    # Pairs [token id or text, bias], or an object. The bias `false` forbids a token.
    logit_bias: list[list[Any]] | dict[str, float | bool] | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    n_probs: Int | None = None
    # True for the probabilities after all samplers.
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    # The fields of the answer; `a/b` is the field `b` of `a`.
    response_fields: list[str] | None = None
    timings_per_token: bool | None = None
    # True if a stream shows how much of the prompt has been computed.
    return_progress: bool | None = None
    # The scales of adapters. Those that are not in the list have the scale 0.
    lora: list[LoraScale] | None = None
    user: str | None = None
    priority: Int | None = None
    cache_salt: str | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = (
        "cache_prompt id_slot min_keep n_keep n_discard n_indent n_cache_reuse "
        "t_max_prompt_ms t_max_predict_ms backend_sampling mirostat_tau mirostat_eta "
        "adaptive_target adaptive_decay"
    )

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = "mirostat"


class LlamaCompletionRequest(LlamaFields, kw_only=True):
    """The body of `POST /completion`.

    A prompt is a text, a list of token ids and texts, or an object with the field `prompt_string`, and in
    `multimodal_data` a file in base64 for each `<__media__>` in it. A list of prompts gets a list of answers.
    """

    prompt: str | dict[str, Any] | list[str | Int | dict[str, Any] | list[str | Int]] | None = None


class LlamaInfillRequest(LlamaFields, kw_only=True):
    """The body of `POST /infill`. The answer follows `input_prefix` and `prompt`, and precedes `input_suffix`."""

    input_prefix: str | None = None
    input_suffix: str | None = None
    prompt: str | None = None
    # Texts of other files, objects with `text` and `filename`.
    input_extra: list[dict[str, Any]] | None = None


class LlamaModelRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /models/load`."""

    model: str | None = None


class LlamaControlRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/chat/completions/control`, which names a running answer and an action."""

    id: str | None = None
    action: str | None = None
    model: str | None = None


class LlamaStreamsRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/streams/lookup`, which names conversations (`X-Conversation-Id`)."""

    conversation_ids: list[str] | None = None
