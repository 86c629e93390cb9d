"""Text Embeddings Inference's `POST /embed`: a list of vectors without anything around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ...client.embeddings import Vector
from ...client.engine_client import RequestGroup
from ...http.errors import json_response, renamer, renaming, verify_choice
from ..bodies.intake import reads
from ..routes.embeddings import EmbeddingRoutes
from ..schema import EmbeddingRequest
from ..schema.text_embeddings import TextEmbeddingsRequest

_SIDES: Final = {None: "right", "Right": "right", "Left": "left"}
"""`truncation_direction` -> the side to cut."""


class TextEmbeddings(EmbeddingRoutes):
    """The route for embeddings. Its other routes are `/rerank` with the field `texts`, and OpenAI's."""

    @reads(TextEmbeddingsRequest)
    async def embed(self, http: Request, body: TextEmbeddingsRequest, size: int) -> Response:
        """Return the embedding of each text."""
        verify_choice("truncation_direction", body.truncation_direction, ("Left", "Right"))
        request = EmbeddingRequest(
            model=body.model,
            input=body.inputs,
            normalize=body.normalize,
            dimensions=body.dimensions,
            prompt_name=body.prompt_name,
            truncate_prompt_tokens=-1 if body.truncate else None,
            truncation_side=_SIDES[body.truncation_direction],
        )

        def answer(group: RequestGroup, vectors: Iterator[Vector], lengths: list[int]) -> Response:
            return json_response([vector.tolist() for vector in vectors])

        with renaming(renamer({"input": "inputs", "truncate_prompt_tokens": "truncate"})):
            return await self._embeddings.run(http, request, size, answer)
