"""The routes of Google's Gemini API."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from functools import partial, wraps
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ....client.embeddings import Vector
from ....client.engine_client import RequestGroup
from ....http.errors import bad_request, json_response, renamer, renaming
from ....http.json_pieces import encode_list
from ....http.routing import Asgi, Route
from ...bodies.intake import Intake, RouteHandlers, reads
from ...bodies.request_memory import MemoryLease
from ...routes.chat_completions import ChatCompletions, render_request
from ...routes.embeddings import EmbeddingRoutes, Embeddings
from ...schema import ChatCompletionRequest, EmbeddingRequest
from ...schema.gemini import (
    GeminiBatchEmbedRequest,
    GeminiCountRequest,
    GeminiEmbedRequest,
    GeminiRequest,
)
from ...serving import Serving
from .answer import GeminiAnswer
from .models import STREAMS, GeminiModels, is_from_google
from .parts import text_of
from .request import thinking_budget, translate

PATH: Final = "/v1beta/"

_PREFIXES: Final = ("/v1beta/models/", "/v1/models/", "/models/")
"""Some clients, such as LiteLLM, leave the version out."""

_METHOD: Final = re.compile("/models/(?P<model>.*):(?P<method>[A-Za-z]+)$")
"""The end of a path: the name of a model and a method."""

METHODS: Final = tuple(
    f":{method}"
    for method in ("generateContent", STREAMS, "countTokens", "embedContent", "batchEmbedContents")
)
"""The ends of the paths."""

_REQUEST: Final = "generateContentRequest"

_PROMPTS: Final = {
    "RETRIEVAL_QUERY": ("query",),
    "RETRIEVAL_DOCUMENT": ("document", "passage"),
    "CLASSIFICATION": ("classification", "Classification"),
    "CLUSTERING": ("clustering", "Clustering"),
}
"""Task type -> the names of the model's prompt for it; the first that the model has is used."""


def routes(serving: Serving, intake: Intake, embeddings: Embeddings) -> list[Route]:
    """Return all routes."""
    chats, models = GeminiChats(serving, intake), GeminiModels(serving)
    counter = GeminiTokenCounter(serving, intake)
    embedded = GeminiEmbeddings(serving, intake, embeddings)
    endpoints: tuple[Any, ...] = (
        *(chats, chats, counter.count),
        *(embedded.embed, embedded.embed_batch),
    )
    return [
        Route("/v1beta/models", models.list),
        *(
            Route(f"{prefix}{{name:path}}{method}", endpoint)
            for prefix in _PREFIXES
            for method, endpoint in zip(METHODS, endpoints, strict=True)
        ),
        Route("/v1beta/models/{name:path}", models.describe),
    ]


Handler = Callable[[Request], Awaitable[Response]]


def for_google(google: Handler, others: Handler) -> Handler:
    """Return a handler that answers Google's clients with `google`, and all others with `others`."""

    @wraps(others)
    async def answer(request: Request) -> Response:
        return await (google if is_from_google(request) else others)(request)

    return answer


class GeminiChats(ChatCompletions):
    """The methods `generateContent` and `streamGenerateContent`."""

    body_schema = GeminiRequest
    cuts_max_tokens = True
    answer_type = GeminiAnswer

    async def _receive(self, asgi: Asgi, lease: MemoryLease) -> tuple[ChatCompletionRequest, int]:
        body, size = await self._intake.receive(asgi, GeminiRequest, lease)
        # The path of a recorded request has not been parsed by the router.
        match = _METHOD.search(asgi.scope["path"])
        assert match is not None, "a route without the name of a model"
        method = partial(translate, streams=match["method"] == STREAMS)
        request = await self._serving.executor.run(size, method, body, match["model"])
        if self._serving.formats.can_limit_reasoning:
            request.thinking_token_budget = thinking_budget(body)
        return request, size


class GeminiTokenCounter(RouteHandlers):
    """Counts the tokens of prompts."""

    @reads(GeminiCountRequest)
    async def count(self, http: Request, body: GeminiCountRequest, size: int) -> Response:
        """Return the number of tokens of the prompt."""
        serving, name = self._serving, http.path_params["name"]
        given, outer = (body, "") if body.request is None else (body.request, f"{_REQUEST}.")
        with renaming(lambda place: outer + place):
            counted = partial(translate, streams=False)
            request = await serving.executor.run(size, counted, given, name)
        serving.verify_model(name)
        serving.verify_tokenizer("contents")
        with renaming(request.sent_name):
            chat = await render_request(serving, request, size)
        count = len(chat.token_ids)
        details = [{"modality": "TEXT", "tokenCount": count}]
        return json_response({"totalTokens": count, "promptTokensDetails": details})


class GeminiEmbeddings(EmbeddingRoutes):
    """Embeds texts."""

    @reads(GeminiEmbedRequest)
    async def embed(self, http: Request, body: GeminiEmbedRequest, size: int) -> Response:
        """Return the embedding of one content."""

        def answer(group: RequestGroup, vectors: Iterator[Vector], lengths: list[int]) -> Response:
            return json_response({"embedding": {"values": next(vectors).tolist()}})

        return await self._run(http, [body], size, answer)

    @reads(GeminiBatchEmbedRequest)
    async def embed_batch(
        self, http: Request, body: GeminiBatchEmbedRequest, size: int
    ) -> Response:
        """Return the embedding of each content."""

        def answer(group: RequestGroup, vectors: Iterator[Vector], lengths: list[int]) -> Response:
            rows = ({"values": vector.tolist()} for vector in vectors)
            usage = {"promptTokenCount": sum(lengths)}
            return json_response(
                {"embeddings": encode_list(rows, at_once=1), "usageMetadata": usage}
            )

        if not body.requests:
            raise bad_request("requests", "is required, and must not be empty")
        return await self._run(http, body.requests, size, answer)

    async def _run(
        self, http: Request, requests: list[GeminiEmbedRequest], size: int, answer: Any
    ) -> Response:
        first = requests[0]
        texts, names = [], {"dimensions": "outputDimensionality"}
        for i, each in enumerate(requests):
            where = "content" if len(requests) == 1 else f"requests[{i}].content"
            if (each.task_type, each.dimensions) != (first.task_type, first.dimensions):
                raise bad_request(
                    f"requests[{i}]",
                    "must have the taskType and outputDimensionality of the others",
                )
            text = text_of(each.content, where)
            texts.append(f"{each.title}\n{text}" if each.title else text)
            # An error of a text names the longer part of it.
            names[f"input[{i}]"] = (
                f"{where[:-7]}title" if len(each.title or "") > len(text) else where
            )
        prompts = self._serving.config.model.pooler.prompts
        kinds = _PROMPTS.get(first.task_type or "", ())
        request = EmbeddingRequest(
            model=http.path_params["name"],
            input=list(texts),
            dimensions=first.dimensions,
            prompt_name=next((name for name in kinds if name in prompts), None),
        )
        with renaming(renamer(names)):
            return await self._embeddings.run(http, request, size, answer)
