"""`POST /v1/score` and `POST /v1/rerank`: how well two texts match, or a text and images.

A classification head with one class reads both texts together. For any other model, the score is the similarity of the
texts' embeddings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.config.model import RankingConfig
from ...chat.list_ranking import ranking_scores
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
from ...http.errors import bad_request, json_response, renamer, renaming, wrong
from ..bodies.intake import Intake, RouteHandlers, reads
from ..pooling import Pooling, render_input, take_media
from ..prompts import Prompt, verify_num_sequences
from ..schema import ComparisonFields, InputFields, RerankRequest, ScoreRequest
from ..serving import Serving
from .embeddings import usage_of
from .ranking import ranking_prompts

Comparable: TypeAlias = str | dict[str, Any]
"""A text, or an object with a `text` or the parts of a message as `content`."""


class Scores(RouteHandlers):
    """The routes that compare texts."""

    def __init__(self, serving: Serving, intake: Intake, pooling: Pooling) -> None:
        super().__init__(serving, intake)
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
                f"must have 1 text, or as many as {second}, which has {len(right)}, got {len(left)}",
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

        return await self._compare(http, request, size, left, right, answer)

    @reads(RerankRequest)
    async def rerank(self, http: Request, request: RerankRequest, size: int) -> Response:
        """Return the documents, ordered by their scores."""
        query = _texts(request.query, "query")
        if request.texts is not None and request.documents is not None:
            raise bad_request("texts", "cannot be combined with documents")
        name = "documents" if request.texts is None else "texts"
        texts = request.texts or request.documents or []
        documents = _texts(texts, name)
        verify_num_sequences(1 + len(documents), name)
        top_n = len(texts) if request.top_n is None else request.top_n
        if top_n < 1:
            raise wrong("top_n", "at least 1", top_n)

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
                    result["document"] = _shown(texts[index])
                results.append(result)
            usage = usage_of(group)
            return json_response(
                {
                    "id": f"rerank-{group.request_id}",
                    "model": self._model_of(request),
                    "results": results,
                    "usage": usage,
                    "meta": {
                        "api_version": {"version": "2"},
                        "billed_units": {"input_tokens": usage["prompt_tokens"]},
                    },
                }
            )

        return await self._compare(http, request, size, query, documents, answer)

    async def _compare(
        self,
        http: Request,
        request: ComparisonFields,
        size: int,
        left: list[Prompt],
        right: list[Prompt],
        answer: Callable[[RequestGroup, list[float]], Response],
    ) -> Response:
        """Score each text of `right` with its partner in `left`. Return the result of `answer` for the scores."""
        serving, model = self._serving, self._serving.config.model
        verify_compares(model)
        template, kwargs = serving.pair_template, request.chat_template_kwargs
        if request.instruction is not None:
            kwargs = {"instruction": request.instruction} | (kwargs or {})
        await self._shorten(left, request.max_tokens_per_query, "max_tokens_per_query")
        await self._shorten(right, request.max_tokens_per_doc, "max_tokens_per_doc")
        if (ranking := model.pooler.ranking) is not None:
            return await self._rank(http, request, ranking, left, right, kwargs or {}, answer)
        if kwargs and template is None:
            raise bad_request(
                "chat_template_kwargs",
                "and instruction must be omitted: this model compares texts without a template",
            )
        if model.classifier is None:
            for prompts, name in ((left, QUERY), (right, DOCUMENT)):
                for each in prompts:
                    if each.content is not None:
                        await self._render(each, request, size)
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
        for prompts, role in ((left, QUERY), (right, DOCUMENT)):
            for each in prompts:
                if each.content is not None:
                    if template is None:
                        raise bad_request(
                            each.param,
                            "must be a text, unless --chat-template is set",
                        )
                    await take_media(serving, each, role, size)
        pairs = []
        for number, each in enumerate(right):
            first = left[number if len(left) > 1 else 0]
            media = (first.media, each.media)
            if template is not None:
                media = template.ordered(*media)
            pairs.append(
                Prompt(
                    first.param,
                    first.text,
                    each.token_ids,
                    second=each.text,
                    second_param=each.param,
                    content=first.content,
                    second_content=each.content,
                    media=(*media[0], *media[1]),
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

    async def _rank(
        self,
        http: Request,
        request: ComparisonFields,
        ranking: RankingConfig,
        left: list[Prompt],
        right: list[Prompt],
        kwargs: dict[str, Any],
        answer: Callable[[RequestGroup, list[float]], Response],
    ) -> Response:
        """Score each text of `right` in a prompt with all others."""
        serving = self._serving
        serving.verify_tokenizer("documents")
        if request.truncate_prompt_tokens is not None:
            raise bad_request(
                "truncate_prompt_tokens",
                "must be omitted, because this model reads all documents in one prompt; use max_tokens_per_doc",
            )
        prompts = ranking_prompts(ranking, left, right, kwargs.get("instruction"))
        return await self._pooling.run(
            http,
            request,
            prompts,
            serving.config.model.pooler.kind,
            lambda group: answer(group, self._list_scores(group, ranking, prompts)),
        )

    def _list_scores(
        self, group: RequestGroup, ranking: RankingConfig, prompts: list[Prompt]
    ) -> list[float]:
        rows = (
            (
                each.token_ids,
                np.frombuffer(sequence.pooled, np.float32).reshape(len(each.token_ids), -1),
            )
            for each, sequence in zip(prompts, group.sequences, strict=True)
        )
        return ranking_scores(ranking, rows, self._serving.tokenizer)

    async def _render(self, each: Prompt, request: ComparisonFields, size: int) -> None:
        """Give a prompt with images the tokens that the model's chat template makes of them, as a user's message."""
        if self._serving.media is None:
            raise bad_request(each.param, "must be a text, because this model reads only text")
        message = {"role": "user", "content": each.content}
        fields = InputFields(chat_template_kwargs=request.chat_template_kwargs)
        with renaming(renamer({"messages[0]": each.param, "messages": each.param})):
            found = await render_input(self._serving, fields, [message], each.param, size)
        each.text, each.token_ids, each.encoder_inputs = (
            found.text,
            found.token_ids,
            found.encoder_inputs,
        )

    async def _shorten(self, prompts: list[Prompt], limit: int, param: str) -> None:
        """Cut each text after `limit` tokens; 0 for no limit."""
        if limit < 0:
            raise wrong(param, "at least 0", limit)
        if not limit:
            return
        serving = self._serving
        serving.verify_tokenizer(param)
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


def _given(
    request: ScoreRequest, names: tuple[str, ...]
) -> tuple[Comparable | list[Comparable] | None, str]:
    """Return the value and the name of the field that the request used, of several with one meaning."""
    given = [name for name in names if getattr(request, name) is not None] or [names[0]]
    if len(given) > 1:
        raise bad_request(given[1], f"must be omitted if {given[0]} is given")
    return getattr(request, given[0]), given[0]


def _texts(value: Comparable | Sequence[Comparable] | None, name: str) -> list[Prompt]:
    """Return the texts of a field. An item that is an object has its text in `content`."""
    if value is None or value == []:
        raise bad_request(name, "is required, and must not be empty")
    if isinstance(value, str | dict):
        return [_prompt(value, name)]
    return [_prompt(each, f"{name}[{i}]") for i, each in enumerate(value)]


def _prompt(value: Comparable, param: str) -> Prompt:
    """Return a text, or an object with `text` or with `content`, as a prompt."""
    nothing = np.empty(0, np.int32)
    if isinstance(value, str):
        return Prompt(param, value, nothing)
    if isinstance(content := value.get("content"), list) and content:
        return Prompt(param, None, nothing, content=content)
    if not isinstance(text := value.get("text"), str):
        raise wrong(param, "a string, or an object with content or a text", value)
    return Prompt(param, text, nothing)


def _shown(document: Comparable) -> dict[str, Any]:
    """Return a document as an answer shows it."""
    if isinstance(document, str):
        return {"text": document}
    name, shown = ("content", "multi_modal") if "content" in document else ("text", "text")
    return {shown: document[name]}
