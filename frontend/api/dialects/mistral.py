"""Mistral's `POST /v1/fim/completions`, which fills in the middle of code, and its list of models.

Answers have the format of chat completions: https://docs.mistral.ai/api/endpoint/fim.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ClassVar, Final

from starlette.requests import Request
from starlette.responses import Response

from ...client.engine_client import Delta, Sequence
from ...http.errors import json_response
from ..answer import PromptAnswer
from ..logprobs import Json
from ..routes.capabilities import Task, reads_audio, reads_images, task_of
from ..routes.completions import Completions
from ..routes.management import Management
from ..schema import UNLIMITED, CompletionRequest
from ..schema.dialects.mistral import MistralFimRequest
from ..serving import Serving
from ..streaming.chunks import Chunks
from ..streaming.event_stream import ChunkEncoder

CLIENT: Final = "mistral-client"
"""The beginning of the user agents of Mistral's clients."""

Handler = Callable[[Request], Awaitable[Response]]


_COPIED: Final = tuple(
    name
    for name in MistralFimRequest.__struct_fields__
    if name in CompletionRequest.__struct_fields__
)


class _FimAnswer(PromptAnswer):
    shows_abort = True

    def whole(self, outputs: list[Delta]) -> Json:
        def choice(index: int, position: int) -> Json:
            output = outputs[position]
            message: Json = {"role": "assistant", "content": output.text, "tool_calls": None}
            message |= {"prefix": False}
            return {"index": index, "message": message, "finish_reason": output.finish_reason}

        choices = self.render_choices(outputs, choice)
        return self.envelope | {"choices": choices, "usage": self.usage()}

    def chunks(self) -> ChunkEncoder:
        return _Chunks(self)


class _Chunks(Chunks[_FimAnswer]):
    """The last chunk has the usage, as in Mistral's API."""

    __slots__ = ()
    _empty_choice: ClassVar[Json] = {"delta": {}}

    def _render(self, sequence: Sequence) -> bytes:
        first = sequence.num_read_tokens == 0
        delta = self.read(sequence)
        content: Json = ({"role": "assistant"} if first else {}) | {"content": delta.text}
        choice = {"index": sequence.position, "delta": content}
        choice["finish_reason"] = reason = delta.finish_reason
        more: Json = {} if reason is None else {"usage": self._answer.usage()}
        return self.chunk(choice, **more)


class MistralFim(Completions):
    """The endpoint that fills in the middle. Without a suffix, it completes the prompt."""

    body_schema = MistralFimRequest
    id_prefix = "fim"
    answer_type = _FimAnswer

    async def _translate(self, body: MistralFimRequest, size: int) -> CompletionRequest:
        fields = {name: getattr(body, name) for name in _COPIED}
        if body.max_tokens is None:
            fields["max_tokens"] = UNLIMITED
        return CompletionRequest(**fields)

    def object_name(self, request: CompletionRequest) -> str:
        """Return the value of the response's field `object`."""
        return "chat.completion.chunk" if request.stream else "chat.completion"


class MistralModels:
    """The routes that list and describe models for Mistral's clients."""

    def __init__(self, serving: Serving, management: Management) -> None:
        self._serving = serving
        self._management = management

    async def models(self, http: Request) -> Response:
        """List the served model names."""
        cards = [self._card(name) for name in self._serving.served_models]
        return json_response({"object": "list", "data": cards})

    async def model(self, http: Request) -> Response:
        """Describe one served model."""
        name = http.path_params["name"]
        self._serving.verify_model(name)
        return json_response(self._card(name))

    def _card(self, name: str) -> Json:
        serving = self._serving
        completes = task_of(serving.config.model) is Task.COMPLETION
        capabilities = {
            "completion_chat": completes,
            "completion_fim": completes and serving.infill_format is not None,
            "function_calling": completes and serving.formats.calls_tools,
            "reasoning": completes and serving.formats.separates_reasoning,
            "vision": reads_images(serving),
            "audio": completes and reads_audio(serving),
            "audio_transcription": task_of(serving.config.model) is Task.TRANSCRIPTION,
            "classification": task_of(serving.config.model) is Task.CLASSIFICATION,
            "fine_tuning": False,
        }
        more = {"name": name, "max_context_length": serving.config.model.max_model_len}
        card = self._management.card(name) | more
        return card | {"type": "base", "capabilities": capabilities}


def for_mistral(mistral: Handler, others: Handler) -> Handler:
    """Return a handler that answers Mistral's clients with `mistral`, and all others with `others`."""

    @wraps(others)
    async def answer(request: Request) -> Response:
        is_mistral = request.headers.get("user-agent", "").startswith(CLIENT)
        return await (mistral if is_mistral else others)(request)

    return answer
