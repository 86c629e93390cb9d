"""The common part of all dialects: translate a body to a chat completion request, and answer in another format."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope

from ...client.engine_client import Sequence
from ...client.sequence_io import TOKENS_AT_ONCE
from ..bodies.intake import Intake
from ..bodies.request_memory import MemoryLease
from ..generation import raise_if_failed
from ..routes.chat_completions import ChatAnswer, ChatChoice, ChatCompletions
from ..schema import ChatCompletionRequest
from ..serving import Serving

Body = TypeVar("Body", bound=msgspec.Struct)


class DialectEndpoint(ChatCompletions, Generic[Body]):
    """An endpoint that answers chats in another API's format."""

    cuts_max_tokens = True

    schema: type[Body]
    """The schema of the dialect's bodies."""

    def __init__(self, serving: Serving, intake: Intake) -> None:
        super().__init__(serving, intake)
        self.body_schema = self.schema

    async def _receive(
        self, scope: Scope, receive: Receive, lease: MemoryLease
    ) -> tuple[ChatCompletionRequest, int]:
        body, size = await self._intake.receive(scope, receive, self.schema, lease)
        size = await self.complete(body, size, lease)
        return await self._serving.executor.run(size, lambda: self.translate(body)), size

    async def complete(self, body: Body, size: int, lease: MemoryLease) -> int:
        """Prepare a body for `translate`, where that takes time. Return its new size in bytes."""
        return size

    @abstractmethod
    def translate(self, body: Body) -> ChatCompletionRequest:
        """Return the body translated to a chat completion request.

        Raises:
            APIError: A field is invalid; it is named as in the body (400).
        """


class DialectChunks:
    """Writes the stream of an answer with one choice."""

    def __init__(self, answer: ChatAnswer) -> None:
        self.answer = answer
        self.choice: ChatChoice = answer.choices[0]
        # The order of text and calls within one delta is lost. So if both are possible, each token is a separate delta.
        self._max_tokens = 1 if answer.request.tools else TOKENS_AT_ONCE

    def read(self, sequence: Sequence) -> Any:
        """Return the new output of a sequence.

        Raises:
            APIError: The sequence failed.
        """
        delta = sequence.read_some(self._max_tokens)
        raise_if_failed(delta)
        return delta
