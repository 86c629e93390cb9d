"""vLLM's routes that end in `/render`, which return the prompts of a request.

The answer is a body of `/inference/v1/generate`, so that one server can render requests that another one computes.
The fields are those of vLLM 0.33.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Generic

import msgspec

from .....protocol.encoder_inputs.inputs import EncoderInput
from .....protocol.encoder_inputs.payloads import AudioPayload, EmbeddingPayload, ImagePayload
from .....protocol.sampling_params import GrammarKind, SamplingParams, StructuredOutput
from ....http.errors import bad_request, json_response
from ....http.routing import Asgi
from ...answer import Request
from ...bodies.request_memory import MemoryLease
from ...chats.formats import ANY_OUTPUT
from ...durable.keeper import Keeper
from ...endpoint import Endpoint
from ...generation import PreparedPrompt, find_request_id, verify_priority, verify_streaming
from ...logprobs import Json
from ...prompts import Prompt
from ...responses.endpoint import Responses
from ...responses.mcp.tools import has_mcp
from ...routes.chat_completions import ChatCompletions
from ...routes.completions import Completions
from ...schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from ...schema.vllm import VllmSampling
from ..anthropic.messages import Messages

_COPIED: Final = sorted({*VllmSampling.__struct_fields__} & {*SamplingParams.__struct_fields__})

_DEFAULTS: Final = SamplingParams()

_decode_payload = msgspec.msgpack.Decoder(ImagePayload | AudioPayload | EmbeddingPayload).decode

_SPEC_NAMES: Final = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.CHOICE: "choice",
    GrammarKind.LARK: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural_tag",
}


class _Render(Endpoint[Request], Generic[Request]):
    """An endpoint that returns the prepared prompts of a request instead of an answer.

    Attributes:
        prefix: The prefix of the requests' IDs.
        is_list: True if the answer is a list.
    """

    prefix: ClassVar[str]
    is_list: ClassVar[bool] = False

    async def _generate(
        self,
        asgi: Asgi,
        lease: MemoryLease,
        request: Request,
        body_size: int,
        deadline: float,
        keeper: Keeper | None = None,
    ) -> None:
        serving = self._serving
        serving.verify_model(request.model)
        verify_streaming(request)
        if request.use_beam_search:
            raise bad_request("use_beam_search", "has no effect on a prompt; leave it out")
        if isinstance(request, CompletionRequest) and request.prompt_embeds is not None:
            raise bad_request("prompt_embeds", "has no token ids; send prompt")
        prompts, _ = await self._prepare(request, body_size, asgi.receive)
        request_id = f"{self.prefix}{find_request_id(request, asgi.state)}"

        def render() -> Json | list[Json]:
            if not self.is_list:
                return self._request(request, prompts[0], request_id)
            if len(prompts) == 1:
                return [self._request(request, prompts[0], request_id)]
            return [
                self._request(request, prompt, f"{request_id}-{i}")
                for i, prompt in enumerate(prompts)
            ]

        size = sum(len(prompt.token_ids) + prompt.num_image_bytes for prompt in prompts)
        response = await serving.executor.run(size, lambda: json_response(render()))
        await response(*asgi)

    def _request(self, request: Request, prompt: PreparedPrompt, request_id: str) -> Json:
        output = prompt.params.structured_output
        return {
            "request_id": request_id,
            "token_ids": prompt.token_ids.tolist(),
            "token_offsets": self._offsets(request, prompt),
            "assistant_tokens_mask": None,
            "features": _features(prompt),
            "content_parts": None,
            "sampling_params": _sampling(request, prompt.params),
            "model": request.model,
            "reasoning_ended": None if output is None else output.reasoning is None,
            "return_token_ids": request.return_token_ids,
            "output_mode": "tokens",
            "stream": bool(request.stream),
            "stream_options": request.stream_options if request.stream else None,
            "cache_salt": request.cache_salt,
            "priority": verify_priority(request.priority),
            "kv_transfer_params": request.kv_transfer_params,
            "ec_transfer_params": None,
            "parse_context": _parse_context(request),
        }

    def _offsets(self, request: Request, prompt: PreparedPrompt) -> list[tuple[int, int]] | None:
        """Return the characters of each token, from start to end, if the request wants them.

        Tokens that are not those of a text have none.
        """
        if not request.return_token_offsets or prompt.text is None or prompt.encoder_inputs:
            return None
        kept = prompt.token_ids.tolist()
        for add_special_tokens in (True, False):
            token_ids, places = self._serving.tokenizer.encode_with_places(
                prompt.text, add_special_tokens
            )
            start = 0 if request.truncation_side == "right" else len(token_ids) - len(kept)
            shown = slice(start, start + len(kept))
            if token_ids[shown] == kept:
                return places[shown]
        return None


class ChatRender(_Render[ChatCompletionRequest], ChatCompletions):
    """The prompt of a conversation."""

    prefix = "chatcmpl-"


class MessagesRender(_Render[ChatCompletionRequest], Messages):
    """The prompt of a conversation in Anthropic's format."""

    prefix = "chatcmpl-"


class ResponsesRender(_Render[ChatCompletionRequest], Responses):
    """The prompt of a response."""

    prefix = "resp_"

    async def _answer(self, asgi: Asgi, lease: MemoryLease) -> None:
        exchange, size, deadline = await self._begin(asgi, lease)
        if has_mcp(exchange.body.tools):
            raise bad_request("tools", "of MCP servers are part of no prompt before the first turn")
        await self._answer_now(exchange, size, asgi, lease, deadline)


class CompletionRender(_Render[CompletionRequest], Completions):
    """A list with the prompts of a completion."""

    prefix = "cmpl-"
    is_list = True

    def _fit(
        self, prompt: Prompt, request: CompletionRequest, params: SamplingParams
    ) -> PreparedPrompt:
        fitted = super()._fit(prompt, request, params)
        # The places of the tokens that are kept are those in the whole text.
        fitted.text = prompt.text
        return fitted


def _sampling(request: GenerationRequest, params: SamplingParams) -> Json:
    """Return the parameters that differ from their defaults, and the limit of tokens."""
    found: Json = {"max_tokens": params.max_tokens}
    for name in _COPIED:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            found[name] = value
    if params.logit_bias:
        found["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if request.stream_interval is not None:
        found["stream_interval"] = request.stream_interval
    output = params.structured_output
    if output is not None:
        if output.spec != ANY_OUTPUT.spec:
            found["structured_outputs"] = _constraint(output)
        if output.reasoning is not None and output.reasoning.max_tokens >= 0:
            found["thinking_token_budget"] = output.reasoning.max_tokens
    return found


def _constraint(output: StructuredOutput) -> Json:
    """Return a constraint in vLLM's format."""
    if output.kind is GrammarKind.JSON_OBJECT:
        return {"json_object": True}
    spec: Any = output.spec
    if output.kind is GrammarKind.CHOICE:
        spec = msgspec.json.decode(spec)
    return {_SPEC_NAMES[output.kind]: spec}


def _parse_context(request: GenerationRequest) -> Json | None:
    """Return the fields of a chat by which its answer is parsed."""
    if not isinstance(request, ChatCompletionRequest):
        return None
    choice = request.tool_choice or ("auto" if request.tools else "none")
    return {
        "tools": request.tools,
        "tool_choice": choice,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "include_reasoning": request.include_reasoning is not False,
        "chat_template_kwargs": request.chat_template_kwargs or {},
    }


def _features(prompt: PreparedPrompt) -> Json | None:
    """Return the hashes and places of images, videos and audio clips; None without any."""
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[Json]] = {}
    for item in prompt.encoder_inputs:
        if item.num_tokens and not item.read_until:
            modality = _modality(item, prompt.video_hashes)
            hashes.setdefault(modality, []).append(item.content_hash.hex())
            place: Json = {"offset": item.position, "length": item.num_tokens}
            places.setdefault(modality, []).append(place)
    if not hashes:
        return None
    return {"mm_hashes": hashes, "mm_placeholders": places, "kwargs_data": None}


def _modality(item: EncoderInput, video_hashes: frozenset[bytes]) -> str:
    if item.content_hash in video_hashes:
        return "video"
    return "audio" if isinstance(_decode_payload(item.data), AudioPayload) else "image"
