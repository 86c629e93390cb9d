"""SGLang's `/encode`, which embeds texts or token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....client.embeddings import Vector
from ....client.engine_client import RequestGroup
from ....http.errors import bad_request, json_response, renamer, renaming
from ....http.json_pieces import encode_list
from ...bodies.intake import reads
from ...logprobs import Json
from ...routes.embeddings import EmbeddingRoutes
from ...schema import EmbeddingRequest
from ...schema.sglang import SglangEncodeRequest
from .media import media_of_each


class SglangEncode(EmbeddingRoutes):
    """The route for embeddings."""

    @reads(SglangEncodeRequest)
    async def encode(self, http: Request, body: SglangEncodeRequest, size: int) -> Response:
        """Return the embedding of a text, or a list with that of each text."""
        if (body.text is None) == (body.input_ids is None):
            raise bad_request("text", "is required, or input_ids instead of it")
        inputs: Any = body.input_ids if body.text is None else body.text
        is_one = isinstance(inputs, str) or bool(inputs and isinstance(inputs[0], int))
        media = media_of_each(body, None if is_one else len(inputs))
        request = EmbeddingRequest(
            model=body.lora_path or None,
            input=inputs,
            dimensions=body.dimensions,
            rid=body.rid,
            priority=body.priority,
            user=body.user,
        )

        def answer(group: RequestGroup, vectors: Iterator[Vector], lengths: list[int]) -> Response:
            if is_one:
                return json_response(_result(next(vectors), lengths[0], group.request_id))
            results = (
                _result(vector, length, f"{group.request_id}_{index}")
                for index, (vector, length) in enumerate(zip(vectors, lengths, strict=True))
            )
            return json_response(encode_list(results, at_once=1))

        with renaming(renamer({"input": "text" if body.input_ids is None else "input_ids"})):
            return await self._embeddings.run(http, request, size, answer, media)


def _result(vector: Vector, num_tokens: int, answer_id: str) -> Json:
    return {
        "embedding": vector.tolist(),
        "meta_info": {"id": answer_id, "finish_reason": None, "prompt_tokens": num_tokens},
    }
