"""`POST /invocations`, the generation route of Amazon SageMaker containers: a completion or a chat completion."""

from __future__ import annotations

from typing import Any

from starlette.types import Receive

from ..bodies.intake import Intake
from ..endpoint import Endpoint, NewAnswer
from ..generation import PreparedPrompt
from ..schema import ChatCompletionRequest, CompletionRequest, GenerationRequest
from ..serving import Serving
from .chat_completions import ChatCompletions
from .completions import Completions


class Invocations(Endpoint[GenerationRequest]):
    """An endpoint that passes each body to the chat or the completions endpoint."""

    def __init__(
        self,
        serving: Serving,
        intake: Intake,
        completions: Completions,
        chat_completions: ChatCompletions,
    ) -> None:
        super().__init__(serving, intake, GenerationRequest, "")
        self.body_schema = ChatCompletionRequest | CompletionRequest
        self._request_type = GenerationRequest
        self._completions = completions
        self._chat_completions = chat_completions

    def id_prefix_of(self, request: GenerationRequest) -> str:
        """Return the prefix of the answer's ID."""
        if isinstance(request, ChatCompletionRequest):
            return self._chat_completions.id_prefix_of(request)
        assert isinstance(request, CompletionRequest)
        return self._completions.id_prefix_of(request)

    def object_name(self, request: GenerationRequest) -> str:
        """Return the value of the response's field `object`."""
        if isinstance(request, ChatCompletionRequest):
            return self._chat_completions.object_name(request)
        assert isinstance(request, CompletionRequest)
        return self._completions.object_name(request)

    async def prepare(
        self, request: GenerationRequest, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[Any]]:
        """Return the encoded prompts, and the constructor of the answer."""
        if isinstance(request, ChatCompletionRequest):
            return await self._chat_completions.prepare(request, body_size, receive)
        assert isinstance(request, CompletionRequest)
        return await self._completions.prepare(request, body_size, receive)
