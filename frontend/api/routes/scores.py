"""`POST /v1/score` and `POST /v1/rerank`: how well two texts match.

A classification head with one class reads both texts together. For any other model, the score is the similarity of the
texts' embeddings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import ParameterError
from ...client.embeddings import (
    DOCUMENT,
    QUERY,
    Vector,
    class_scores,
    read_vectors,
    similarities,
    verify_compares,
)
from ...client.engine_client import RequestGroup
from ...http.errors import bad_request, echo, json_response, rename_parameter
from ..bodies.intake import Intake, reads
from ..pooling import Pooling
from ..prompts import Prompt, verify_num_characters, verify_num_sequences
from ..schema import ComparisonFields, RerankRequest, ScoreRequest
from ..serving import Serving
from .embeddings import usage_of


class Scores:
    """The routes that compare texts."""

    def __init__(self, serving: Serving, intake: Intake, pooling: Pooling) -> None:
        self._serving = serving
        self._intake = intake
        self._pooling = pooling

    @reads(ScoreRequest)
    async def score(self, http: Request, request: ScoreRequest, size: int) -> Response:
        """Return the score of each pair of texts."""
        queries, first = _given(request, ("text_1", "queries", "data_1"))
        documents, second = _given(request, ("text_2", "documents", "items", "data_2"))
        left, right = _texts(queries, first), _texts(documents, second)
        if len(left) not in (1, len(right)):
            raise bad_request(
                first,
                f"{first} must have 1 text, or as many as {second}, which has {len(right)}, got {len(left)}",
            )
        verify_num_sequences(len(left) + len(right), second)

        def answer(group: RequestGroup, scores: list[float]) -> Response:
            return json_response(
                {
                    "id": f"score-{group.request_id}",
                    "object": "list",
                    "created": int(time.time()),
                    "model": self._model_of(request),
                    "data": [
                        {"index": index, "object": "score", "score": score}
                        for index, score in enumerate(scores)
                    ],
                    "usage": usage_of(group),
                }
            )

        return await self._compare(http, request, left, right, answer)

    @reads(RerankRequest)
    async def rerank(self, http: Request, request: RerankRequest, size: int) -> Response:
        """Return the documents, ordered by their scores."""
        query = _texts(request.query, "query")
        if request.texts is not None and request.documents is not None:
            raise bad_request("texts", "texts cannot be combined with documents")
        name = "documents" if request.texts is None else "texts"
        texts = request.texts or _document_texts(request.documents)
        documents = _texts(texts, name)
        verify_num_sequences(1 + len(documents), name)
        top_n = len(texts) if request.top_n is None else request.top_n
        if top_n < 1:
            raise bad_request("top_n", f"top_n must be at least 1, got {top_n}")

        def answer(group: RequestGroup, scores: list[float]) -> Response:
            order = sorted(range(len(scores)), key=lambda index: -scores[index])
            results: list[dict[str, Any]] = []
            if request.texts is not None:
                for index in order[:top_n]:
                    shown = {"text": texts[index]} if request.return_text else {}
                    results.append({"index": index, "score": scores[index]} | shown)
                return json_response(results)
            for index in order[:top_n]:
                result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
                if request.return_documents is not False:
                    result["document"] = {"text": texts[index]}
                results.append(result)
            return json_response(
                {
                    "id": f"rerank-{group.request_id}",
                    "model": self._model_of(request),
                    "results": results,
                    "usage": usage_of(group),
                }
            )

        return await self._compare(http, request, query, documents, answer)

    async def _compare(
        self,
        http: Request,
        request: ComparisonFields,
        left: list[Prompt],
        right: list[Prompt],
        answer: Callable[[RequestGroup, list[float]], Response],
    ) -> Response:
        """Score each text of `right` with its partner in `left`. Return the result of `answer` for the scores."""
        serving, model = self._serving, self._serving.config.model
        try:
            verify_compares(model)
        except ParameterError as error:
            raise rename_parameter(error, error.param) from None
        template, kwargs = serving.pair_template, request.chat_template_kwargs
        if request.instruction is not None:
            kwargs = {"instruction": request.instruction} | (kwargs or {})
        await self._shorten(left, request.max_tokens_per_query, "max_tokens_per_query")
        await self._shorten(right, request.max_tokens_per_doc, "max_tokens_per_doc")
        if kwargs and template is None:
            raise bad_request(
                "chat_template_kwargs",
                "chat_template_kwargs and instruction must be omitted: this model compares texts without a template",
            )
        if model.classifier is None:
            for prompts, name in ((left, QUERY), (right, DOCUMENT)):
                for each in prompts:
                    each.instruction, each.role = model.pooler.prompts.get(name), name
            texts = [*left, *right]
            return await self._pooling.run(
                http,
                request,
                texts,
                model.pooler.kind,
                lambda group: answer(
                    group, similarities(self._vectors(group, texts), len(left), model.pooler)
                ),
            )
        pairs = []
        for number, each in enumerate(right):
            first = left[number if len(left) > 1 else 0]
            pairs.append(
                Prompt(
                    first.param,
                    first.text,
                    each.token_ids,
                    second=each.text,
                    second_param=each.param,
                )
            )
        if template is not None:
            await self._pooling.apply_template(request, template, pairs, kwargs or {})
        return await self._pooling.run(
            http,
            request,
            pairs,
            model.pooler.kind,
            lambda group: answer(group, self._class_scores(group, request.use_activation)),
        )

    async def _shorten(self, prompts: list[Prompt], limit: int, param: str) -> None:
        """Cut each text after `limit` tokens; 0 for no limit.

        Raises:
            APIError: The limit is negative, or there is no tokenizer (400).
        """
        if limit < 0:
            raise bad_request(param, f"{param} must be at least 0, got {limit}")
        if not limit:
            return
        serving = self._serving
        serving.verify_tokenizer(param)
        for each in prompts:
            verify_num_characters(
                len(each.text or ""), each.param, serving.config.model.max_model_len
            )
        encoded = await serving.encode([each.text or "" for each in prompts], False)
        for each, token_ids in zip(prompts, encoded, strict=True):
            if len(token_ids) > limit:
                each.text = serving.tokenizer.decode(token_ids[:limit])

    def _model_of(self, request: ComparisonFields) -> str:
        return self._serving.answering_model(request.model)

    def _vectors(self, group: RequestGroup, texts: list[Prompt]) -> list[Vector]:
        model = self._serving.config.model
        return [
            read_vectors(sequence.pooled, model.pooler.kind, model, text.token_ids, text.keeps_T)
            for sequence, text in zip(group.sequences, texts, strict=True)
        ]

    def _class_scores(self, group: RequestGroup, activate: bool | None) -> list[float]:
        classifier = self._serving.config.model.classifier
        assert classifier is not None
        return [
            class_scores(
                np.frombuffer(sequence.pooled, np.float32), classifier, activate=activate
            ).item()
            for sequence in group.sequences
        ]


def _given(request: ScoreRequest, names: tuple[str, ...]) -> tuple[str | list[str] | None, str]:
    """Return the value and the name of the field that the request used, of several with one meaning.

    Raises:
        APIError: The request has more than one of them (400).
    """
    given = [name for name in names if getattr(request, name) is not None] or [names[0]]
    if len(given) > 1:
        raise bad_request(given[1], f"{given[1]} must be omitted if {given[0]} is given")
    return getattr(request, given[0]), given[0]


def _texts(value: str | list[str] | None, name: str) -> list[Prompt]:
    """Return the texts of a field.

    Raises:
        APIError: There are none (400).
    """
    if value is None or value == []:
        raise bad_request(name, f"{name} is required, and must not be empty")
    nothing = np.empty(0, np.int32)
    if isinstance(value, str):
        return [Prompt(name, value, nothing)]
    return [Prompt(f"{name}[{i}]", text, nothing) for i, text in enumerate(value)]


def _document_texts(documents: Sequence[str | dict[str, Any]] | None) -> list[str]:
    """Return the text of each document, which may be an object with a `text`.

    Raises:
        APIError: A document has none (400).
    """
    texts = []
    for i, document in enumerate(documents or ()):
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str):
            raise bad_request(
                f"documents[{i}]",
                f"documents[{i}] must be a string or an object with a text, got {echo(document)}",
            )
        texts.append(text)
    return texts
