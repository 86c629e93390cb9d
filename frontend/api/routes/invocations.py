"""`POST /invocations`, the generation route of Amazon SageMaker containers: a completion or a chat completion."""

from __future__ import annotations

from typing import Any

from starlette.types import Receive

from ..bodies.body import InvocationDecoder
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
        self._decoder = InvocationDecoder(serving.config.frontend.strict)
        self._completions = completions
        self._chat_completions = chat_completions

    def _id_prefix_of(self, request: GenerationRequest) -> str:
        if isinstance(request, ChatCompletionRequest):
            return self._chat_completions._id_prefix_of(request)
        assert isinstance(request, CompletionRequest)
        return self._completions._id_prefix_of(request)

    def _object_name(self, request: GenerationRequest) -> str:
        if isinstance(request, ChatCompletionRequest):
            return self._chat_completions._object_name(request)
        assert isinstance(request, CompletionRequest)
        return self._completions._object_name(request)

    async def _prepare(
        self, request: GenerationRequest, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[Any]]:
        if isinstance(request, ChatCompletionRequest):
            return await self._chat_completions._prepare(request, body_size, receive)
        assert isinstance(request, CompletionRequest)
        return await self._completions._prepare(request, body_size, receive)
