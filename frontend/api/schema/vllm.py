"""The request bodies of vLLM's own routes, and of SageMaker's for adapters."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from ....protocol.sampling_params import RepetitionDetectionParams
from . import Int, QueueFields, SamplingFields, StreamOptions


class GenerativeScoringRequest(QueueFields, kw_only=True):
    """The body of `POST /generative_scoring`, and of SGLang's `POST /v1/score`.

    Each item gets the probability of a label as the next token.
    """

    query: str | list[Int] | None = None
    items: str | list[str | list[Int]] | None = None
    label_token_ids: list[Int] | None = None
    # If true, the probabilities of the labels add up to 1; else, they are the probabilities among all tokens. The
    # default is true, and false for `/v1/score`.
    apply_softmax: bool | None = None
    # True if an item precedes the query.
    item_first: bool | None = None
    # True if the query gets the special tokens of the tokenizer.
    add_special_tokens: bool | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "request_id"

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = (
        "query_embed_overrides item_embed_overrides return_token_logprobs "
        "return_pooled_hidden_states score_extraction_token"
    )


class VllmSampling(SamplingFields, kw_only=True):
    """The sampling parameters of `/inference/v1/generate`."""

    n: Int | None = None
    seed: Int | None = None
    # Tokens of the answer; by default as many as fit into the context.
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    typical_p: float | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: Int | None = None
    prompt_logprobs: Int | None = None
    logprob_token_ids: list[Int] | None = None
    # Candidates in place of each token of the prompt after `prompt_logprob_start` and the next; -1 for none.
    prompt_logprob_token_ids: list[Int | list[Int]] | None = None
    prompt_logprob_start: Int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    stream_interval: Int | None = None
    # Maximum tokens of the reasoning, if the server can find its end.
    thinking_token_budget: Int | None = None

    # Accepted because clients send them; they have no effect.
    detokenize: bool | None = None
    spaces_between_special_tokens: bool | None = None
    output_kind: Int | None = None
    skip_clone: bool | None = None
    output_text_buffer_length: Int | None = None
    flat_logprobs: bool | None = None
    # Answers do not depend on the prefix cache.
    skip_reading_prefix_cache: bool | None = None

    # Rejected, because an answer that ignores them would be wrong.
    extra_args: Any = None
    watermarking: Any = None
    routed_experts_prompt_start: Any = None
    trace_decode_token_ids: Any = None


class VllmGenerateRequest(QueueFields, kw_only=True):
    """The body of `POST /inference/v1/generate`."""

    token_ids: list[Int] | None = None
    sampling_params: VllmSampling | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # "tokens", "text", which adds the text and gives log-probabilities as in chats, or "derender", which adds the
    # message of a chat.
    output_mode: str | None = None
    # With "derender", the fields of the chat by which the message is parsed.
    parse_context: dict[str, Any] | None = None
    # True to return the token ids of the prompt.
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    # The ID of the request, unless the header X-Request-Id has one.
    request_id: str | None = None
    # The replica, instead of that of the header X-data-parallel-rank.
    data_parallel_rank: Int | None = None
    # False if a constraint applies only after the reasoning, as rendered conversations say.
    reasoning_ended: bool | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "token_offsets assistant_tokens_mask reasoning_parser_kwargs"

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = "features content_parts ec_transfer_params"


class VllmAbortRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /inference/v1/abort_requests`: the IDs that the requests were sent with."""

    request_ids: list[str] | None = None


class VllmGeneratedChoice(msgspec.Struct, kw_only=True):
    """A choice in the answer of `/inference/v1/generate`."""

    index: Int | None = None
    token_ids: list[Int] | None = None
    finish_reason: str | None = None
    stop_reason: str | Int | None = None
    logprobs: dict[str, Any] | None = None


class VllmGenerated(msgspec.Struct, kw_only=True):
    """An answer of `/inference/v1/generate`."""

    request_id: str | None = None
    choices: list[VllmGeneratedChoice] | None = None
    # These are returned as they are.
    prompt_logprobs: Any = None
    kv_transfer_params: Any = None
    metrics: dict[str, Any] | None = None
    # Returned if the request of the answer has `return_token_ids`.
    prompt_token_ids: list[Int] | None = None
    # In the chunks of a stream.
    usage: dict[str, Any] | None = None


class VllmStreamState(msgspec.Struct, kw_only=True):
    """The state of a streamed derender, which the client returns with the next chunk."""

    output_token_ids: list[Int] | None = None
    role_sent: bool | None = None
    # The length of all tokens with log-probabilities so far, in characters.
    logprob_text_offset: Int | None = None

    # vLLM's other fields. They have no effect, because the tokens determine them.
    output_chunk_lens: list[Int] | None = None
    prev_tokens: list[str] | None = None
    prefix_offset: Int | None = None
    read_offset: Int | None = None
    logprob_context_token_ids: list[Int] | None = None
    tools_streamed: bool | None = None
    last_tool_call_ids: list[str] | None = None


class DerenderFields(msgspec.Struct, kw_only=True):
    """The fields that requests to write answers and completions share."""

    model: str | None = None
    # True to write one chunk of a stream.
    stream: bool | None = None
    generate_chunk: VllmGenerated | None = None
    stream_state: VllmStreamState | None = None


class VllmChatDerenderRequest(DerenderFields, kw_only=True):
    """The body of `POST /v1/chat/completions/derender`."""

    generate_response: VllmGenerated | None = None
    # The request that was rendered: its tools are parsed, and its conversation decides how the answer begins.
    chat_request: dict[str, Any] | None = None
    prompt_tokens: Int | None = None
    prompt_token_ids: list[Int] | None = None


class VllmCompletionDerenderRequest(DerenderFields, kw_only=True):
    """The body of `POST /v1/completions/derender`."""

    generate_responses: list[VllmGenerated] | None = None
    completion_request: dict[str, Any] | None = None
    # One number and one list for each response; those of one prompt with `stream`.
    prompt_tokens: Int | list[Int] | None = None
    prompt_token_ids: list[Int | list[Int]] | None = None


class VllmCallRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /collective_rpc`."""

    # "reload_weights".
    method: str | None = None
    # "weights_path": a checkpoint; without it, the files of the served one are read again.
    kwargs: dict[str, Any] | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "args timeout"


class LoadLoraRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/load_lora_adapter`.

    `lora_path` is a directory on the server, or a repository on the hub. With `load_inplace` it replaces an adapter
    with the same name.
    """

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "is_3d_lora_weight pinned"


class SagemakerLoadRequest(msgspec.Struct, kw_only=True):
    """The body of SageMaker's `POST /adapters`: the name of an adapter, and where it is."""

    name: str | None = None
    src: str | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = "preload pin"


class UnloadLoraRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/unload_lora_adapter`. `lora_int_id` is ignored."""

    lora_name: str | None = None

    ignored: ClassVar[str] = "lora_int_id"
