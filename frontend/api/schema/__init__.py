"""The schemas of the request bodies. A field that is null is treated as absent."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, TypeAlias

import msgspec

from ....protocol.sampling_params import RepetitionDetectionParams
from ...client.embeddings import LateChunkingParams
from ...model_source.lora_registry import LoraScale
from .aliases import CHAT_ALIASES, GENERATION_ALIASES, Aliases, read_aliases, read_reasoning

Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class QueueFields(msgspec.Struct, kw_only=True):
    """The model, and the fields by which requests wait for it and share its prefix cache."""

    model: str | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    # The tenant. Ignored if the server has several API keys.
    user: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a streamed response."""

    # Without `stream`, the presence of this field is an error, even if it is null.
    include_usage: bool | msgspec.UnsetType | None = msgspec.UNSET
    continuous_usage_stats: bool | msgspec.UnsetType | None = msgspec.UNSET
    include_obfuscation: bool | msgspec.UnsetType | None = msgspec.UNSET


class SamplingFields(msgspec.Struct, kw_only=True):
    """The sampling parameters that most APIs share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


class SamplerFields(SamplingFields, kw_only=True):
    """The samplers of llama.cpp that others do not have, and the choice of those that apply."""

    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    # The temperature grows with the entropy, by at most the range in both directions.
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    # The penalty for repetitions.
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Int | None = None
    dry_penalty_last_n: Int | None = None
    dry_sequence_breakers: list[str] | None = None
    # The names or the letters of the samplers that apply, in their order.
    samplers: str | list[str] | None = None


class CommonFields(SamplerFields, kw_only=True):
    """The fields with the same meaning in completions, chat completions and responses."""

    seed: Int | None = None
    stop: str | list[str] | None = None
    # Regular expressions whose first match ends the output, as in SGLang. The match stays in the text.
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Int | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    # SGLang's name of `cache_salt`.
    extra_key: str | None = None
    # Adds the field `engine` to the usage: a receipt of the request's costs.
    include_receipt: bool | None = None
    # Adds llama.cpp's field `timings` to the answer, and to the chunk of a stream that has the usage.
    timings_per_token: bool | None = None
    # Adds events with the progress of the prompt to a stream, as llama.cpp does.
    return_progress: bool | None = None
    # The ID of the request, unless the header X-Request-Id has one.
    request_id: str | None = None
    # The replica, instead of that of the header X-data-parallel-rank.
    data_parallel_rank: Int | None = None
    routed_dp_rank: Int | None = None


class GenerationRequest(CommonFields, kw_only=True):
    """The fields that completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    best_of: Int | None = None
    max_tokens: Int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Int] | None = None
    prompt_logprobs: Int | None = None
    # Tokens whose log-probabilities are returned instead of those of the most likely tokens. Needs `logprobs`.
    logprob_token_ids: list[Int] | None = None
    # With beam search, `n` is the number of beams.
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    return_tokens_as_token_ids: bool | None = None
    # Tokens per chunk of a stream after the first one, if it is more than the server's `--stream-interval`.
    stream_interval: Int | None = None
    return_token_ids: bool | None = None
    # Of the routes that render; others ignore it.
    return_token_offsets: bool | None = None
    # Adds SGLang's field `sglext`, which says where the cached tokens were.
    return_cached_tokens_details: bool | None = None
    # Adds the hidden states of the last token to each choice, as SGLang does: true, or "last".
    return_hidden_states: bool | str | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    # The tenant. Ignored if the server has several API keys.
    user: str | None = None

    # KV transfer: where another engine holds the prompt's blocks, or that this one should hold them.
    kv_transfer_params: dict[str, Any] | None = None

    # The scales of adapters, as in llama.cpp. At most one of them may be other than 0.
    lora: list[LoraScale] | None = None

    # Constraints, under their names in SGLang, llama.cpp and earlier releases of vLLM.
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    # Other names of fields above; see `aliases.py`.
    no_stop_trim: bool | None = None
    n_predict: Int | None = None
    max_new_tokens: Int | None = None
    min_new_tokens: Int | None = None
    repeat_penalty: float | None = None
    random_seed: Int | None = None
    rid: str | list[str] | None = None
    # The name of an adapter, in place of `model`.
    lora_path: str | None = None

    # `store` requests that the answer is stored with this metadata. Only chat answers can be stored.
    metadata: dict[str, Any] | None = None
    store: bool | None = None

    # Accepted because clients send them; they have no effect.
    ignored: ClassVar[str] = (
        "service_tier safety_identifier prompt_cache_key prompt_cache_retention "
        "prompt_cache_options custom_labels session_id "
        "spaces_between_special_tokens guided_decoding_backend"
    )

    aliases: ClassVar[Aliases] = GENERATION_ALIASES

    # Rejected (see `refused.py`), because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = (
        "logits_processors vllm_xargs mm_processor_kwargs custom_logit_processor "
        "mirostat moderation suffix "
        "prompt_embeds early_stopping return_weight_versions "
        "return_spec_tokens_details images_config watermark watermarking media_io_kwargs "
        "ec_transfer_params return_routed_experts custom_params "
        "session_params routed_experts_start_len bootstrap_host bootstrap_port bootstrap_room "
        "disagg_prefill_dp_rank"
    )

    def __post_init__(self) -> None:
        self.model = self.lora_path or self.model
        read_aliases(self, self.aliases)

    def sent_name(self, name: str) -> str:
        """Return the name under which the client sent a field: its own or an alias."""
        for alias in self.aliases.get(name, ()):
            if getattr(self, alias) is not None:
                return alias
        return name

    @property
    def num_outputs(self) -> int:
        """The number of outputs for each prompt."""
        return 1 if self.n is None else self.n


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/completions`."""

    # Objects have a text and its media, in llama.cpp's format.
    prompt: str | dict[str, Any] | list[str | Int | list[Int] | dict[str, Any]] | None = None
    # The text after the answer, for models that fill in the middle.
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None
    # The first text or tokens of the answer of a model with an encoder, such as the token of a language.
    decoder_prompt: str | list[Int] | None = None
    echo: bool | None = None
    logprobs: Int | None = None

    rejected: ClassVar[str] = "thinking_token_budget"


class Reasoning(msgspec.Struct, kw_only=True):
    """The fields of reasoning in one object, as in SGLang and at OpenRouter."""

    effort: str | None = None
    max_tokens: Int | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] | None = None
    # The token ids of the prompt, instead of `messages` and the chat template.
    prompt_token_ids: list[Int] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Instead of the model's, if the server has --trust-request-chat-template.
    chat_template: str | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tool_choice: str | dict[str, Any] | None = None
    # The older names of `tools` and `tool_choice`.
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None
    # Maximum tokens of reasoning.
    thinking_token_budget: Int | None = None
    include_reasoning: bool | None = None
    # SGLang's fields: false leaves the reasoning in the content, or sends it in one chunk of a stream.
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    # Allows the client to end the reasoning of the running answer, as in llama.cpp.
    reasoning_control: bool | None = None
    # Adds the prompt after the chat template to the answer, or to the first chunk of a stream.
    return_prompt_text: bool | None = None
    # Adds the token ids of the prompt to each choice, as SGLang does.
    return_prompt_token_ids: bool | None = None
    # Adds SGLang's `meta_info` to each choice.
    return_meta_info: bool | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    echo: bool | None = None
    # Text that the answer may repeat. It provides drafts and does not change the answer.
    prediction: dict[str, Any] | None = None

    # How images and videos are read; see `media_options.py`. The last ones are SGLang's.
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    use_audio_in_video: bool | None = None
    images_config: dict[str, Any] | None = None
    video_config: dict[str, Any] | None = None
    max_dynamic_patch: Int | None = None
    min_dynamic_patch: Int | None = None

    # Other names of fields above; see `aliases.py`. The limits are those of llama.cpp and Qwen's API.
    input_ids: list[Int] | None = None
    reasoning_budget_tokens: Int | None = None
    thinking_budget_tokens: Int | None = None
    thinking_budget: Int | None = None
    # They stand for `thinking`, `reasoning_effort`, `thinking_token_budget` and `include_reasoning`.
    enable_thinking: bool | None = None
    reasoning: Reasoning | None = None

    aliases: ClassVar[Aliases] = CHAT_ALIASES

    rejected: ClassVar[str] = (
        "audio web_search_options "
        "return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask "
        "sampling_logprobs_mode return_flat_raw_output_top_logprobs "
        "return_flat_raw_top_logprobs_b64 task"
    )

    def __post_init__(self) -> None:
        read_reasoning(self)
        super().__post_init__()
        # Mistral's and DeepSeek's clients mark the message that the answer continues.
        if self.continue_final_message is None and self.messages:
            self.continue_final_message = _has_prefix(self.messages[-1])

    def sent_name(self, name: str) -> str:
        """Return the name under which the client sent a field: its own or an alias."""
        if name == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if self.input_ids is not None and name.startswith("prompt_token_ids"):
            return name.replace("prompt_token_ids", "input_ids")
        return "top_logprobs" if name == "logprobs" else super().sent_name(name)

    def shows_tool(self, name: str) -> bool:
        """Return whether the prompt begins with the definition of a tool."""
        return True


def _has_prefix(message: Any) -> bool | None:
    return True if isinstance(message, dict) and message.get("prefix") is True else None


class AgentChat(ChatCompletionRequest, kw_only=True):
    """A chat completion request from an API with tools that messages load.

    Attributes:
        loaded_tools: The tools that messages define, so that loading them leaves the prompt before it in the cache.
    """

    loaded_tools: frozenset[str] = frozenset()

    def shows_tool(self, name: str) -> bool:
        """Return whether the prompt begins with the definition of a tool."""
        return name not in self.loaded_tools


class BatchChatCompletionRequest(ChatCompletionRequest, kw_only=True):
    """A chat completion request with a list of conversations in `messages`."""

    messages: list[list[dict[str, Any]]] | None = None  # type: ignore[assignment]


class PoolingFields(QueueFields, kw_only=True):
    """The fields that requests to embed, compare or classify texts share."""

    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None

    # The ID of the request, unless the header X-Request-Id has one, and SGLang's name, which has priority.
    request_id: str | None = None
    rid: str | list[str] | None = None

    ignored: ClassVar[str] = "safety_identifier metadata"
    # Padding cannot change a result. Models that were trained with it always get it.
    padding: bool | str | None = None

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = "mm_processor_kwargs"


class InputFields(PoolingFields, kw_only=True):
    """The fields that requests to embed or classify share: texts, tokens or conversations."""

    # Objects, and lists that mix texts and token ids, are llama.cpp's formats.
    input: str | dict[str, Any] | list[str | Int | dict[str, Any] | list[str | Int]] | None = None
    # A conversation, or a list of them, instead of `input`; may contain images or audio.
    messages: list[dict[str, Any] | list[dict[str, Any]]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    # How the images and videos of conversations are read, as in a chat.
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(InputFields, kw_only=True):
    """The body of `POST /v1/embeddings`. As in llama.cpp, `content` instead of `input` has answers of another form."""

    content: str | dict[str, Any] | list[str | Int | dict[str, Any] | list[str | Int]] | None = None
    embd_normalize: Int | None = None
    encoding_format: str | None = None
    # The type and the byte order of numbers in base64.
    embed_dtype: str | None = None
    endianness: str | None = None
    dimensions: Int | None = None
    normalize: bool | None = None
    # vLLM's name of `normalize`, and of the activation of class probabilities.
    use_activation: bool | None = None

    # A vector for each chunk of an input, as in vLLM.
    late_chunking_params: LateChunkingParams | None = None

    rejected: ClassVar[str] = "lora_path embed_overrides"

    # The name of one of the model's prompts, whose text is put before every input.
    prompt_name: str | None = None
    # For `/pooling` the vectors to return, as in vLLM; otherwise the use of the embeddings, as in Jina's API.
    task: str | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """The body of `POST /pooling`."""


class ClassificationRequest(InputFields, kw_only=True):
    """The body of `POST /classify` and `POST /v1/classify`."""

    use_activation: bool | None = None


class ComparisonFields(PoolingFields, kw_only=True):
    """The fields that requests to compare texts share."""

    use_activation: bool | None = None
    # Variables of the chat template that combines a pair of texts. `instruction` is one of them.
    chat_template_kwargs: dict[str, Any] | None = None
    instruction: str | None = None
    # Maximum tokens of each text; 0 for no limit.
    max_tokens_per_query: Int = 0
    max_tokens_per_doc: Int = 0


class ScoreRequest(ComparisonFields, kw_only=True):
    """The body of `POST /v1/score`."""

    # Texts, or objects with `content`: the parts of a message, such as images.
    text_1: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    text_2: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    # Other names of `text_1`, then of `text_2`.
    queries: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    data_1: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    documents: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    items: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    data_2: str | dict[str, Any] | list[str | dict[str, Any]] | None = None


class RerankRequest(ComparisonFields, kw_only=True):
    """The body of `POST /v1/rerank`."""

    query: str | dict[str, Any] | None = None
    documents: list[str | dict[str, Any]] | None = None
    top_n: Int | None = None
    return_documents: bool | None = None
    # The name of `documents` in the API of Text Embeddings Inference, whose format the answer then has.
    texts: list[str] | None = None
    return_text: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /tokenize`."""

    model: str | None = None
    # A list of texts gets a list of lists.
    prompt: str | list[str] | None = None
    # The fields of llama.cpp: a text, which gets no special tokens unless `add_special` is true.
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    parse_special: bool | None = None
    # The field of Cohere: a text whose answer also has `token_strings`.
    text: str | None = None
    # The field of TGI: a text whose tokens are returned with their places.
    inputs: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    # The choice none leaves the tools out.
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None

    # As in a chat.
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /detokenize`."""

    model: str | None = None
    # A list of lists gets a list of texts.
    tokens: list[Int | list[Int]] | None = None
    skip_special_tokens: bool | None = None


UNLIMITED: Final = -1
"""The `max_tokens` with which an answer may use the rest of the context."""
