"""Cohere's `POST /v2/embed`: embeddings of texts and images, as numbers or bits."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ....client.embeddings import Vector
from ....client.engine_client import RequestGroup
from ....http.errors import APIError, json_response, renamer, renaming, verify_choice, wrong
from ...bodies.intake import reads
from ...routes.embeddings import EmbeddingRoutes
from ...schema import EmbeddingRequest
from ...schema.cohere import CohereEmbedRequest

_PROMPTS: Final = {
    "search_query": ("query",),
    "search_document": ("document", "passage"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
    "image": (),
}
"""Value of `input_type` -> the names of the model's prompt for it; the first that the model has is used."""


def _bits(vector: Vector) -> Any:
    """Return a bit for each element, 1 if it is positive, eight in a byte, the first in the highest place."""
    return np.packbits(vector > 0)


_ENCODERS: Final[dict[str, Callable[[Vector], Any]]] = {
    "float": lambda vector: vector.tolist(),
    "base64": lambda vector: base64.b64encode(vector.astype("<f4").tobytes()).decode(),
    "ubinary": lambda vector: _bits(vector).tolist(),
    "binary": lambda vector: (_bits(vector).astype(np.int16) - 128).tolist(),
}
"""Embedding type -> the JSON value of a vector."""


class CohereEmbeddings(EmbeddingRoutes):
    """The route for embeddings."""

    @reads(CohereEmbedRequest)
    async def embed(self, http: Request, body: CohereEmbedRequest, size: int) -> Response:
        """Return an embedding of each text, image or combination of them."""
        kinds = body.embedding_types or ["float"]
        for kind in kinds:
            verify_choice("embedding_types", kind, _ENCODERS)
        name = self._name_of_input(body)
        request = self._translate(body)

        def answer(group: RequestGroup, vectors: Iterator[Vector], lengths: list[int]) -> Response:
            embeddings: dict[str, list[Any]] = {kind: [] for kind in kinds}
            for vector in vectors:
                if len(vector) % 8 and not {"binary", "ubinary"}.isdisjoint(kinds):
                    raise wrong("output_dimension", "a multiple of 8 for bits", len(vector))
                for kind, values in embeddings.items():
                    values.append(_ENCODERS[kind](vector))
            num_tokens = sum(lengths)
            has_images = any(sequence.request.encoder_inputs for sequence in group.sequences)
            num_image_tokens = num_tokens if has_images else 0
            return json_response(
                {
                    "id": f"embd-{group.request_id}",
                    "embeddings": embeddings,
                    "texts": body.texts or [],
                    "meta": {
                        "api_version": {"version": "2"},
                        # Cohere and vLLM count all tokens of requests with images as those of images.
                        "billed_units": {
                            "input_tokens": num_tokens - num_image_tokens,
                            "image_tokens": num_image_tokens,
                        },
                    },
                    "response_type": "embeddings_by_type",
                }
            )

        names = {
            "input": "texts",
            "messages": name,
            "dimensions": "output_dimension",
            "truncate_prompt_tokens": "max_tokens",
        }
        with renaming(renamer(names)):
            return await self._embeddings.run(http, request, size, answer)

    def _name_of_input(self, body: CohereEmbedRequest) -> str:
        given = [name for name in ("texts", "images", "inputs") if getattr(body, name)]
        if len(given) != 1:
            raise APIError(
                400,
                f"one of texts, images and inputs must have items, got {len(given)} of them",
                param="texts",
            )
        return given[0]

    def _translate(self, body: CohereEmbedRequest) -> EmbeddingRequest:
        """Return the body translated to a request for embeddings. Raise APIError 400 if `input_type` is unknown."""
        verify_choice("input_type", body.input_type, _PROMPTS)
        verify_choice("truncate", body.truncate, ("NONE", "START", "END"))
        prompts = self._serving.config.model.pooler.prompts
        names = _PROMPTS[body.input_type or "image"]
        keep = -1 if body.max_tokens is None else body.max_tokens
        contents = [each.content for each in body.inputs or ()]
        contents += [
            [{"type": "image_url", "image_url": {"url": url}}] for url in body.images or ()
        ]
        return EmbeddingRequest(
            model=body.model,
            input=list(body.texts) if body.texts else None,
            messages=[[{"role": "user", "content": content}] for content in contents] or None,
            dimensions=body.output_dimension,
            prompt_name=next((name for name in names if name in prompts), None),
            truncate_prompt_tokens=None if body.truncate == "NONE" else keep,
            truncation_side="left" if body.truncate == "START" else "right",
            priority=body.priority,
        )
