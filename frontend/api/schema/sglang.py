"""The request bodies of SGLang's own routes."""

from __future__ import annotations

from typing import Any

import msgspec

from . import Int


class SglangSampling(msgspec.Struct, kw_only=True):
    """The sampling parameters of a request."""

    max_new_tokens: Int | None = None
    min_new_tokens: Int | None = None
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    sampling_seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    stream_interval: Int | None = None

    # Accepted because clients send them; they have no effect.
    spaces_between_special_tokens: bool | None = None

    # Rejected, because an answer that ignores them would be wrong.
    stop_regex: Any = None
    custom_params: Any = None


class SglangGenerateRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /generate`. A list of texts, or of lists of token ids, gets a list of answers."""

    text: str | list[str] | None = None
    input_ids: list[Int | list[Int]] | None = None
    sampling_params: SglangSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    # The first token of the prompt whose log-probability is returned; -1 for none.
    logprob_start_len: Int | None = None
    top_logprobs_num: Int | None = None
    # Tokens whose log-probabilities are returned besides. Several lists, one for each prompt, must be equal.
    token_ids_logprob: list[Int | list[Int]] | None = None
    return_text_in_logprobs: bool | None = None
    # The ids of the answers.
    rid: str | list[str] | None = None
    # The name of an adapter.
    lora_path: str | None = None
    priority: Int | None = None
    # Cached prefixes are shared only by requests with the same key.
    extra_key: str | None = None
    user: str | None = None

    # Accepted because clients send them; they have no effect.
    modalities: list[str] | None = None
    log_metrics: bool | None = None
    no_logs: bool | None = None
    background: bool | None = None
    conversation_id: str | None = None
    routing_key: str | None = None
    custom_labels: dict[str, str] | None = None
    require_reasoning: bool | None = None

    # Rejected, because an answer that ignores them would be wrong.
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    return_entropy: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    bootstrap_host: Any = None
