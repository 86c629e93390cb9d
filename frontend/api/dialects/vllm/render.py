"""vLLM's `/v1/chat/completions/render` and `/v1/completions/render`: what the engine would be given for a request.

The answer is a body of `/inference/v1/generate`, so that one server can render requests that another one computes.
The fields are those of vLLM 0.32.
"""

from __future__ import annotations

from typing import Any, Final, Generic

import msgspec
from starlette.types import Receive, Scope, Send

from .....protocol.encoder_inputs.inputs import EncoderInput
from .....protocol.sampling_params import GrammarKind, SamplingParams, StructuredOutput
from ....http.errors import bad_request, json_response
from ...answer import Request
from ...bodies.request_memory import MemoryLease
from ...durable.keeper import Keeper
from ...endpoint import Endpoint
from ...generation import PreparedPrompt, find_request_id, verify_priority, verify_streaming
from ...logprobs import Json
from ...routes.chat_completions import ChatCompletions
from ...routes.completions import Completions
from ...schema import ChatCompletionRequest, CompletionRequest
from ...schema.vllm import VllmSampling

_COPIED: Final = sorted({*VllmSampling.__struct_fields__} & {*SamplingParams.__struct_fields__})

_DEFAULTS: Final = SamplingParams()

_SPEC_NAMES: Final = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.CHOICE: "choice",
    GrammarKind.LARK: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural_tag",
}


class _Render(Endpoint[Request], Generic[Request]):
    """An endpoint that returns the prepared prompts of a request instead of an answer."""

    is_list: bool

    async def _generate(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
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
        prompts, _ = await self._prepare(request, body_size, receive)
        request_id = f"{self.id_prefix}-{find_request_id(request, scope['state'])}"

        def render() -> Json | list[Json]:
            if not self.is_list:
                return self._request(request, prompts[0], request_id)
            return [
                self._request(request, prompt, f"{request_id}-{i}" if i else request_id)
                for i, prompt in enumerate(prompts)
            ]

        size = sum(len(prompt.token_ids) for prompt in prompts)
        response = await serving.executor.run(size, lambda: json_response(render()))
        await response(scope, receive, send)

    def _request(self, request: Request, prompt: PreparedPrompt, request_id: str) -> Json:
        return {
            "request_id": request_id,
            "token_ids": prompt.token_ids.tolist(),
            "token_offsets": None,
            "assistant_tokens_mask": None,
            "features": _features(prompt.encoder_inputs),
            "content_parts": None,
            "sampling_params": _sampling(prompt.params),
            "model": request.model,
            "return_token_ids": request.return_token_ids,
            "output_mode": "tokens",
            "stream": bool(request.stream),
            "stream_options": request.stream_options if request.stream else None,
            "cache_salt": request.cache_salt,
            "priority": verify_priority(request.priority),
            "kv_transfer_params": request.kv_transfer_params,
            "ec_transfer_params": None,
        }


class ChatRender(_Render[ChatCompletionRequest], ChatCompletions):
    """The prompt of a conversation."""

    is_list = False


class CompletionRender(_Render[CompletionRequest], Completions):
    """A list with the prompts of a completion."""

    is_list = True


def _sampling(params: SamplingParams) -> Json:
    """Return the parameters that differ from their defaults, and the limit of tokens."""
    found: Json = {"max_tokens": params.max_tokens}
    for name in _COPIED:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            found[name] = value
    if params.logit_bias:
        found["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if params.structured_output is not None:
        found["structured_outputs"] = _constraint(params.structured_output)
    return found


def _constraint(output: StructuredOutput) -> Json:
    """Return a constraint in vLLM's format. Reasoning before the text is left out."""
    if output.kind is GrammarKind.JSON_OBJECT:
        return {"json_object": True}
    spec: Any = output.spec
    if output.kind is GrammarKind.CHOICE:
        spec = msgspec.json.decode(spec)
    return {_SPEC_NAMES[output.kind]: spec}


def _features(inputs: list[EncoderInput]) -> Json | None:
    """Return where images, audio and the like are in the prompt; None if there are none."""
    if not inputs:
        return None
    places = [{"offset": item.position, "length": item.num_tokens} for item in inputs]
    hashes = [item.content_hash.hex() for item in inputs]
    return {
        "mm_hashes": {"media": hashes},
        "mm_placeholders": {"media": places},
        "kwargs_data": None,
    }
