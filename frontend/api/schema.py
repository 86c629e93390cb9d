"""What clients may send. Every field may be null, which means the same as leaving it out."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Int] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Int | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Int | None = None
    add_special_tokens: bool | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    # The tenant, where the server has not several API keys.
    user: str | None = None

    # Constraints as SGLang and llama.cpp call them.
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None

    # Fields of SGLang and llama.cpp that stand for one above.
    no_stop_trim: bool | None = None
    n_predict: Int | None = None

    # Accepted because clients send them; they change nothing here.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    moderation: Any = None
    request_id: str | None = None
    session_id: str | None = None
    spaces_between_special_tokens: bool | None = None

    # Refused by name: ignoring them would change the meaning of the answer.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_decoding_backend: Any = None
    guided_whitespace_pattern: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    mm_processor_kwargs: Any = None
    lora_path: Any = None
    stop_regex: Any = None
    custom_logit_processor: Any = None
    typical_p: Any = None
    dry_multiplier: Any = None
    mirostat: Any = None
    xtc_probability: Any = None

    def __post_init__(self) -> None:
        if self.max_tokens is None:
            self.max_tokens = self.n_predict
        if self.max_tokens == -1:
            self.max_tokens = None
        if self.include_stop_str_in_output is None:
            self.include_stop_str_in_output = self.no_stop_trim
        if self.best_of == (1 if self.n is None else self.n):
            self.best_of = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | Int | list[Int]] | None = None
    echo: bool | None = None
    logprobs: Int | None = None

    suffix: Any = None
    prompt_embeds: Any = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None

    chat_template: Any = None
    audio: Any = None
    echo: Any = None
    functions: Any = None
    function_call: Any = None
    prediction: Any = None
    thinking_token_budget: Any = None
    web_search_options: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_completion_tokens == -1:
            self.max_completion_tokens = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    chat_template: Any = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[Int] | None = None
    skip_special_tokens: bool | None = None


_NOT_SUPPORTED = "is not supported"
_USE_STRUCTURED = "is not supported; use structured_outputs or response_format"

REFUSED: dict[str, str] = {
    "guided_json": _USE_STRUCTURED,
    "guided_regex": _USE_STRUCTURED,
    "guided_choice": _USE_STRUCTURED,
    "guided_grammar": _USE_STRUCTURED,
    "guided_decoding_backend": _USE_STRUCTURED,
    "guided_whitespace_pattern": _USE_STRUCTURED,
    "best_of": "is not supported beyond n",
    "use_beam_search": _NOT_SUPPORTED,
    "length_penalty": "is not supported, it belongs to beam search",
    "logits_processors": "is not supported; use logit_bias",
    "kv_transfer_params": _NOT_SUPPORTED,
    "vllm_xargs": _NOT_SUPPORTED,
    "mm_processor_kwargs": _NOT_SUPPORTED,
    "lora_path": _NOT_SUPPORTED,
    "stop_regex": "is not supported; use stop",
    "custom_logit_processor": "is not supported; use logit_bias",
    "typical_p": _NOT_SUPPORTED,
    "dry_multiplier": _NOT_SUPPORTED,
    "mirostat": _NOT_SUPPORTED,
    "xtc_probability": _NOT_SUPPORTED,
    "suffix": _NOT_SUPPORTED,
    "prompt_embeds": _NOT_SUPPORTED,
    "chat_template": "is not accepted from requests; start the server with --chat-template",
    "audio": _NOT_SUPPORTED,
    "echo": "is not supported for chat; use /v1/completions",
    "functions": "is not supported; use tools",
    "function_call": "is not supported; use tool_choice",
    "prediction": _NOT_SUPPORTED,
    "thinking_token_budget": _NOT_SUPPORTED,
    "web_search_options": _NOT_SUPPORTED,
}

NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "echo": (False,),
    "functions": ([],),
    "suffix": ("",),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "lora_path": ("",),
    "stop_regex": ("", []),
    "custom_logit_processor": ("",),
    "typical_p": (1,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "xtc_probability": (0,),
}
"""Values of refused fields that ask for nothing."""
