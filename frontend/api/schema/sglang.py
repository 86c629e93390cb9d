"""The request bodies of SGLang's own routes."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from . import Int, SamplingFields


class PlainSampling(SamplingFields, kw_only=True):
    """The sampling parameters that completion requests have too, with the same meaning."""

    n: Int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    stream_interval: Int | None = None


class SglangSampling(PlainSampling, kw_only=True):
    """The sampling parameters of a request."""

    max_new_tokens: Int | None = None
    min_new_tokens: Int | None = None
    sampling_seed: Int | None = None
    no_stop_trim: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    # Accepted because clients send them; they have no effect.
    spaces_between_special_tokens: bool | None = None

    # Rejected, because an answer that ignores them would be wrong.
    custom_params: Any = None
    beam_width: Any = None
    watermark: Any = None


class SglangSessionParams(msgspec.Struct, kw_only=True):
    """The place of a request within a session."""

    id: str | None = None
    # The ID of the finished request whose tokens this one continues.
    rid: str | None = None
    # The number of these tokens that are kept; if negative, how many at the end are dropped.
    offset: Int | None = None
    # True to drop all requests of the session, unless `rid` names one.
    replace: bool | None = None
    # True to continue the prompt of the request `rid` without its output.
    drop_previous_output: bool | None = None


class SglangInput(msgspec.Struct, kw_only=True):
    """The fields that requests to generate and to embed share."""

    text: str | list[str] | None = None
    input_ids: list[Int | list[Int]] | None = None
    # A file, or a list of files: URLs, paths, base64, or objects with `url`. Several prompts have a list with the value
    # for each prompt, or a file for all of them.
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    priority: Int | None = None
    user: str | None = None

    # Accepted because clients send them; they have no effect. The server computes its own hashes of media.
    ignored: ClassVar[str] = "modalities log_metrics routing_key mm_hashes mm_content_hashes"

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = "positional_embed_overrides"


class SglangGenerateRequest(SglangInput, kw_only=True):
    """The body of `POST /generate`. A list of texts, or of lists of token ids, gets a list of answers.

    A parameter that may be a list then has a value for each of them.
    """

    # Embeddings of the tokens of a prompt, or of several prompts.
    input_embeds: list[list[float | list[float]]] | None = None
    # The same for one prompt: float32 in base64, and its shape [tokens, hidden size].
    input_embeds_bytes: str | None = None
    input_embeds_shape: list[Int] | None = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    # The first token of the prompt whose log-probability is returned; -1 for none.
    logprob_start_len: Int | list[Int] | None = None
    top_logprobs_num: Int | list[Int] | None = None
    # Tokens whose log-probabilities are returned besides.
    token_ids_logprob: list[Int | list[Int]] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    # True to count the tokens of the reasoning.
    require_reasoning: bool | None = None
    # The hidden states of all tokens, or with "last" those of the last one.
    return_hidden_states: bool | str | list[bool | str] | None = None
    # The ids of the answers. The id of a single prompt is also the ID of the request.
    rid: str | list[str] | None = None
    # The name of an adapter.
    lora_path: str | list[str | None] | None = None
    # Cached prefixes are shared only by requests with the same key.
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    session_params: SglangSessionParams | None = None
    # The replica.
    routed_dp_rank: Int | None = None
    data_parallel_rank: Int | None = None
    # Settings of processors, as in chats. They have no effect on a prompt without images, videos or audio.
    mm_processor_kwargs: dict[str, Any] | None = None
    use_audio_in_video: bool | list[bool] | None = None
    video_config: Any = None
    images_config: Any = None
    max_dynamic_patch: Int | list[Int | None] | None = None
    min_dynamic_patch: Int | list[Int | None] | None = None
    image_max_dynamic_patch: Int | list[Int | None] | None = None
    video_max_dynamic_patch: Int | list[Int | None] | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = (
        "no_logs background conversation_id session_id custom_labels kv_hints "
        "external_trace_header received_time"
    )

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = (
        "return_routed_experts return_entropy "
        "custom_logit_processor watermark max_thinking_tokens return_sampling_mask "
        "sampling_logprobs_mode return_flat_raw_top_logprobs "
        "return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 "
        "routed_experts_start_len return_indexer_topk multi_item_delimiter_indices "
        "token_indices_to_pool bootstrap_host bootstrap_port "
        "bootstrap_room bootstrap_pair_key decode_tp_size disagg_prefill_dp_rank"
    )


class SglangOpenSessionRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /open_session`."""

    # A random ID if absent.
    session_id: str | None = None
    # True if each request continues the one before.
    streaming: bool | None = None
    # Seconds without a request after which the session is closed.
    timeout: float | None = None

    # Accepted because clients send it; it has no effect.
    ignored: ClassVar[str] = "capacity_of_str_len"


class SglangCloseSessionRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /close_session`."""

    session_id: str = ""


class SglangAbortRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /abort_request`: the `rid` or `X-Request-Id` of the requests to abort, or `abort_all`."""

    rid: str = ""
    abort_all: bool | None = None


class SglangPauseRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /pause_generation` and of `POST /continue_generation`, which has no fields."""

    # "abort" ends unfinished requests, "in_place" keeps them as they are, and "retract" also frees their blocks.
    mode: str | None = None


class SglangMemoryRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /release_memory_occupation` and of `POST /resume_memory_occupation`."""

    tags: list[str] | None = None


class SglangWeightsRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /update_weights_from_disk`."""

    model_path: str = ""
    # True to end unfinished requests; otherwise they are finished with the old weights.
    abort_all_requests: bool | None = None
    # The name of the weights in `meta_info` and in `/model_info`.
    weight_version: str | None = None
    # True to stay paused afterwards.
    keep_pause: bool | None = None

    # Accepted because clients send them; they have no effect. Caches of the old weights are always cleared.
    ignored: ClassVar[str] = (
        "load_format is_async torch_empty_cache recapture_cuda_graph token_step flush_cache "
        "manifest"
    )


class SglangVersionRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /update_weight_version`."""

    new_version: str = ""
    # False to let unfinished requests go on; their answers have the new name.
    abort_all_requests: bool | None = None


class SglangEncodeRequest(SglangInput, kw_only=True):
    """The body of `POST /encode`. A list of texts, or of lists of token ids, gets a list of answers."""

    # The name of an adapter.
    lora_path: str | None = None
    dimensions: Int | None = None
    rid: str | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "sampling_params"

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = "embed_overrides input_embeds"


class SglangCallsRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /parse_function_call`. Without `tool_call_parser`, the format is that of the served model."""

    text: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_call_parser: str | None = None


class SglangReasoningRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /separate_reasoning`."""

    text: str = ""
    reasoning_parser: str | None = None
    return_blocks: bool | None = None
