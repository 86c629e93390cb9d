"""Describe the served models in the format of Google's Gemini API."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ....http.errors import json_response
from ...logprobs import Json
from ...routes.capabilities import Task, task_of
from ...serving import Serving

STREAMS: Final = "streamGenerateContent"

_CLIENT: Final = "x-goog-api-client"


def is_from_google(request: Request) -> bool:
    """Return whether a client of Google's sent the request. Its newer versions use the paths of OpenAI's models."""
    return _CLIENT in request.headers


class GeminiModels:
    """Describes the served models."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def list(self, request: Request) -> Response:
        """List the served models."""
        return json_response({"models": [self._card(name) for name in self._serving.served_models]})

    async def describe(self, request: Request) -> Response:
        """Describe one served model."""
        name = request.path_params["name"]
        self._serving.verify_model(name)
        return json_response(self._card(name))

    def _card(self, name: str) -> Json:
        model = self._serving.config.model
        completes = task_of(model) is Task.COMPLETION
        return {
            "name": f"models/{name}",
            "baseModelId": name,
            "version": "1",
            "displayName": name,
            "inputTokenLimit": model.max_model_len,
            "outputTokenLimit": model.max_model_len,
            "supportedGenerationMethods": [
                *(("generateContent", STREAMS, "countTokens") if completes else ()),
                *("embedContent", "batchEmbedContents"),
            ],
        }
