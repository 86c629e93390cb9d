"""`POST /invocations`, the only route of Amazon SageMaker containers: its body may be that of several other routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...http.routing import Asgi
from ..bodies.intake import Intake, RouteHandlers
from ..bodies.request_memory import MemoryLease
from ..dialects.text_embeddings import TextEmbeddings
from ..durable.records import replay_body
from ..endpoint import Endpoint, SharedEndpoint
from ..schema import (
    ChatCompletionRequest,
    ClassificationRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
    RerankRequest,
    ScoreRequest,
)
from ..schema.text_embeddings import TextEmbeddingsRequest
from ..serving import Serving
from .chat_completions import ChatCompletions
from .completions import Completions
from .embeddings import Embeddings
from .scores import Scores

SCORE_FIELDS: Final = frozenset({"text_1", "queries", "data_1"})
"""The names of the first texts of a score. A body with one of them is a score's."""

_ADAPTER_HEADER: Final = b"x-amzn-sagemaker-adapter-identifier"
"""SageMaker's header with the name of an adapter, which replaces `model` of a body."""


class Invocations(SharedEndpoint[GenerationRequest]):
    """An endpoint that passes each body to the chat or the completions endpoint."""

    body_schema = ChatCompletionRequest | CompletionRequest

    def __init__(
        self,
        serving: Serving,
        intake: Intake,
        completions: Completions,
        chat_completions: ChatCompletions,
    ) -> None:
        super().__init__(serving, intake)
        self._completions = completions
        self._chat_completions = chat_completions

    async def _receive(self, asgi: Asgi, lease: MemoryLease) -> tuple[GenerationRequest, int]:
        request, size = await self._intake.receive(asgi, GenerationRequest, lease)
        for name, value in asgi.scope["headers"]:
            if name == _ADAPTER_HEADER:
                request.model = value.decode("latin-1")
        return request, size

    def endpoint_of(self, request: GenerationRequest) -> Endpoint[Any]:
        """Return the endpoint that answers a request."""
        is_chat = isinstance(request, ChatCompletionRequest)
        return self._chat_completions if is_chat else self._completions


class PoolingInvocations(RouteHandlers):
    """The same route for a model that does not generate: scores, rankings, classes or embeddings.

    `POST /` of Text Embeddings Inference has such a body too.
    """

    body_schema = (
        EmbeddingRequest
        | ClassificationRequest
        | ScoreRequest
        | RerankRequest
        | TextEmbeddingsRequest
    )

    def __init__(
        self,
        serving: Serving,
        intake: Intake,
        embeddings: Embeddings,
        scores: Scores,
        texts: TextEmbeddings,
    ) -> None:
        super().__init__(serving, intake)
        self._embeddings = embeddings
        self._scores = scores
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the route that its fields belong to."""
        body = await self._intake.receive_bytes(Asgi(scope, receive, send))
        names = await self._serving.executor.run(len(body), field_names, body)
        response = await self._find_route(names)(Request(scope, replay_body(body, receive)))
        await response(scope, receive, send)

    def _find_route(self, names: frozenset[str]) -> Callable[[Request], Awaitable[Response]]:
        if "query" in names:
            return self._scores.rerank
        if names & SCORE_FIELDS:
            return self._scores.score
        if "inputs" in names:
            return self._texts.embed
        is_classifier = self._serving.config.model.classifier is not None
        return self._embeddings.classify if is_classifier else self._embeddings.embed


def field_names(body: bytes) -> frozenset[str]:
    """Return the names of a body's fields; none if it is invalid, which the route reports that then decodes it."""
    try:
        return frozenset(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return frozenset()
