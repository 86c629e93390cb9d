"""The routes of Ollama's API for chats, completions, embeddings and models. Streams are JSON lines."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .... import __version__
from ....protocol.file_identity import LoraAdapter
from ....protocol.sampling_params import SamplingParams
from ...client.embeddings import Vector
from ...client.engine_client import RequestGroup
from ...http.errors import APIError, bad_request, echo, json_response, renaming
from ...http.json_pieces import encode_list
from ...http.routing import Route
from ..bodies.intake import Intake, RouteHandlers, reads
from ..chats.prompt import RenderedChat
from ..infill import require_infill
from ..logprobs import Json
from ..prompts import verify_num_characters
from ..routes.capabilities import list_for_ollama
from ..routes.chat_completions import ChatCompletions, ChatPlan
from ..routes.embeddings import EmbeddingRoutes, Embeddings
from ..routes.loras import Loras
from ..schema import ChatCompletionRequest, EmbeddingRequest
from ..schema.ollama import (
    OllamaChatRequest,
    OllamaCopyRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
)
from ..serving import Serving
from ..structured.constraint import Constraint
from ..tools.tool_choice import ToolChoice
from .ollama_answer import (
    OLLAMA_STREAM,
    OllamaChatAnswer,
    OllamaTextAnswer,
    answer_without_prompt,
    nanoseconds,
)
from .ollama_request import LATEST, UNLOAD, OllamaPrompt, translate_chat, translate_generate

PATH: Final = "/api/"

API_VERSION: Final = "0.13.0"
"""The version of Ollama whose API this is. Some clients refuse to work with older versions."""


NEVER_EXPIRES: Final = "9999-12-31T23:59:59Z"
"""The time at which a model is unloaded that stays loaded."""


def routes(serving: Serving, intake: Intake, loras: Loras, embeddings: Embeddings) -> list[Route]:
    """Return all routes."""
    models = OllamaModels(serving, intake, loras)
    embed = OllamaEmbeddings(serving, intake, embeddings)
    return [
        Route("/api/chat", OllamaChat(serving, intake)),
        Route("/api/generate", OllamaGenerate(serving, intake)),
        Route("/api/embed", embed.embed),
        Route("/api/embeddings", embed.embed_one),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.running),
        Route("/api/show", models.show),
        Route("/api/pull", models.pull),
        Route("/api/copy", models.copy),
        Route("/api/delete", models.delete, methods=["DELETE"]),
        Route("/api/create", models.create),
        Route("/api/push", models.push),
        Route("/api/version", models.version),
    ]


def served_name(serving: Serving, name: str | None) -> str | None:
    """Return the name of a served model without the tag that clients append; other names unchanged."""
    if name and name not in serving.served_models:
        return name.removesuffix(LATEST)
    return name


class OllamaChat(ChatCompletions):
    """The endpoint for chats."""

    body_schema = OllamaChatRequest
    cuts_max_tokens = True
    answer_type = OllamaChatAnswer

    async def _translate(self, body: OllamaChatRequest, size: int) -> ChatCompletionRequest:
        name = served_name(self._serving, body.model)
        return await self._serving.executor.run(size, translate_chat, body, name)

    def _greeting(self, request: ChatCompletionRequest) -> Json | None:
        return _load(self._serving, request, "/api/chat")


class OllamaGenerate(ChatCompletions):
    """The endpoint for single prompts."""

    body_schema = OllamaGenerateRequest
    cuts_max_tokens = True
    answer_type = OllamaTextAnswer

    async def _translate(self, body: OllamaGenerateRequest, size: int) -> ChatCompletionRequest:
        name = served_name(self._serving, body.model)
        return await self._serving.executor.run(size, translate_generate, body, name)

    def _greeting(self, request: ChatCompletionRequest) -> Json | None:
        return _load(self._serving, request, "/api/generate")

    async def _render(
        self, plan: ChatPlan, request: ChatCompletionRequest, size: int
    ) -> RenderedChat:
        assert isinstance(request, OllamaPrompt)
        if request.raw is None:
            return await super()._render(plan, request, size)
        text, limit = request.raw, self._serving.config.model.max_model_len
        verify_num_characters(len(text), "prompt", limit)
        if (suffix := request.middle_before) is not None:
            infill = require_infill(self._serving.infill_format)
            verify_num_characters(len(suffix), "suffix", limit)
            tokenizer = self._serving.tokenizer
            token_ids = await self._serving.executor.run(
                len(text) + len(suffix),
                lambda: infill.encode(tokenizer, text, suffix, add_special_tokens=True),
            )
            return RenderedChat(text, token_ids, [])
        [encoded] = await self._serving.encode([text], True)
        return RenderedChat(text, encoded, [])

    def _params(
        self, request: ChatCompletionRequest, tools: ToolChoice, constraint: Constraint | None
    ) -> SamplingParams:
        params = super()._params(request, tools, constraint)
        infill = self._serving.infill_format
        assert isinstance(request, OllamaPrompt)
        if request.middle_before is not None and infill is not None:
            params.stop_token_ids = tuple({*params.stop_token_ids, *infill.end_ids})
        return params


def _load(serving: Serving, request: ChatCompletionRequest, path: str) -> Json | None:
    """Load or unload the model if the request has no prompt, and return the answer; return None for others.

    Without `--sleep-idle`, the model always stays loaded.
    """
    assert isinstance(request, OllamaPrompt)
    if not request.done_reason:
        return None
    if serving.config.recovery.sleep_idle_s is not None:
        sleep = serving.engine.sleep
        (sleep.unload if request.done_reason == UNLOAD else sleep.load)()
    return answer_without_prompt(path, request.model or "", request.done_reason)


class OllamaEmbeddings(EmbeddingRoutes):
    """The routes for embeddings."""

    @reads(OllamaEmbedRequest)
    async def embed(self, http: Request, body: OllamaEmbedRequest, size: int) -> Response:
        """Return an embedding of each input."""
        begin = time.monotonic()

        def answer(group: RequestGroup, vectors: Iterator[Vector], lengths: list[int]) -> Response:
            rows = (vector.tolist() for vector in vectors)
            return json_response(
                {
                    "model": body.model or self._serving.served_name,
                    "embeddings": encode_list(rows, at_once=1),
                    "total_duration": nanoseconds(time.monotonic() - begin),
                    "load_duration": 0,
                    "prompt_eval_count": sum(lengths),
                }
            )

        request = self._translate(body, body.input, "input")
        return await self._embeddings.run(http, request, size, answer)

    @reads(OllamaEmbedRequest)
    async def embed_one(self, http: Request, body: OllamaEmbedRequest, size: int) -> Response:
        """Return the embedding of a prompt."""

        def answer(group: RequestGroup, vectors: Iterator[Vector], lengths: list[int]) -> Response:
            return json_response({"embedding": next(vectors).tolist()})

        given = body.input if body.prompt is None else body.prompt
        request = self._translate(body, given, "prompt")
        return await self._embeddings.run(http, request, size, answer)

    def _translate(
        self, body: OllamaEmbedRequest, given: str | list[str] | None, name: str
    ) -> EmbeddingRequest:
        if given is None:
            raise bad_request(name, "is required")
        return EmbeddingRequest(
            model=served_name(self._serving, body.model),
            input=given if isinstance(given, str) else list(given),
            dimensions=body.dimensions,
            truncate_prompt_tokens=None if body.truncate is False else -1,
        )


class OllamaModels(RouteHandlers):
    """The routes that describe the served models, and those that change them."""

    def __init__(self, serving: Serving, intake: Intake, loras: Loras) -> None:
        super().__init__(serving, intake)
        self._loras = loras
        self._size = sum(file.size for file in serving.config.model.weight_files)
        modified = max((file.modified_ns for file in serving.config.model.weight_files), default=0)
        when = datetime.fromtimestamp(modified / 1e9 or time.time(), UTC)
        self._modified_at = when.isoformat(timespec="microseconds").replace("+00:00", "Z")

    async def tags(self, request: Request) -> Response:
        """List the served models."""
        found = {"capabilities": list_for_ollama(self._serving)}
        cards = [self._card(name) | found for name in self._serving.served_models]
        return json_response({"models": cards})

    async def running(self, request: Request) -> Response:
        """List the loaded models: all served models, unless the server sleeps."""
        if self._serving.engine.sleep.is_asleep:
            return json_response({"models": []})
        loaded = {
            "expires_at": NEVER_EXPIRES,
            "size_vram": 0,
            "context_length": self._serving.config.model.max_model_len,
        }
        cards = [self._card(name) | loaded for name in self._serving.served_models]
        return json_response({"models": cards})

    @reads(OllamaModelRequest)
    async def show(self, http: Request, body: OllamaModelRequest, size: int) -> Response:
        """Describe one served model."""
        name = self._name_in(body)
        model, serving = self._serving.config.model, self._serving
        source = ""
        # Some models have no chat template.
        with contextlib.suppress(APIError):
            source = serving.chat_template(with_tools=False).source
        return json_response(
            {
                "modelfile": f"FROM {name}\n",
                "parameters": "",
                "template": source,
                "details": self._details(),
                "model_info": {
                    "general.architecture": model.architecture,
                    f"{model.architecture}.context_length": model.max_model_len,
                },
                "capabilities": list_for_ollama(serving),
                "modified_at": self._modified_at,
            }
        )

    @reads(OllamaModelRequest)
    async def pull(self, http: Request, body: OllamaModelRequest, size: int) -> Response:
        """Report success for a served model. Other models cannot be loaded into a running server."""
        self._name_in(body)
        if body.stream is False:
            return json_response({"status": "success"})
        lines = b'{"status":"pulling manifest"}\n{"status":"success"}\n'
        return Response(lines, media_type=OLLAMA_STREAM.content_type.decode())

    @reads(OllamaCopyRequest)
    async def copy(self, http: Request, body: OllamaCopyRequest, size: int) -> Response:
        """Give an adapter a further name."""
        source = served_name(self._serving, body.source)
        name = served_name(self._serving, body.destination)
        if not source or not name:
            raise APIError(400, "both source and destination are required")
        self._serving.verify_model(source)
        adapter = self._adapter(source, "copied")
        if name in self._serving.config.model.served_names:
            raise bad_request("destination", f"must not be {echo(name)}, the name of the model")
        copy = msgspec.structs.replace(adapter, name=name)
        with renaming(lambda _: "destination"):
            await asyncio.to_thread(self._serving.loras.add, copy, replaces=False)
        return Response()

    @reads(OllamaModelRequest)
    async def delete(self, http: Request, body: OllamaModelRequest, size: int) -> Response:
        """Remove an adapter. Its running requests are not affected."""
        name = self._adapter(self._name_in(body), "deleted").name
        await asyncio.to_thread(self._serving.loras.remove, name)
        return Response()

    @reads(OllamaModelRequest)
    async def create(self, http: Request, body: OllamaModelRequest, size: int) -> Response:
        """Refuse, because a running server has one model."""
        raise APIError(
            400,
            "A running server creates no models; add adapters with POST /v1/load_lora_adapter, and send system, "
            "template and options with each request",
        )

    @reads(OllamaModelRequest)
    async def push(self, http: Request, body: OllamaModelRequest, size: int) -> Response:
        """Refuse, because Engine uploads no models."""
        raise APIError(400, "Engine uploads no models; use the program of the registry")

    def _adapter(self, name: str, action: str) -> LoraAdapter:
        """Return the adapter of this name, which may be changed.

        Raises:
            APIError: It is the model (400), or the operator does not allow changes (404).
        """
        adapter = self._serving.loras.find(name)
        if adapter is None:
            raise APIError(400, f"The model {echo(name)} cannot be {action}; only its adapters can")
        self._loras.verify_allowed()
        return adapter

    async def version(self, request: Request) -> Response:
        """Return the version of Ollama's API, and Engine's own."""
        return json_response({"version": API_VERSION, "engine": __version__})

    def _name_in(self, body: OllamaModelRequest) -> str:
        name = served_name(self._serving, body.model or body.name)
        if not name:
            raise bad_request("model", "is required")
        self._serving.verify_model(name)
        return name

    def _card(self, name: str) -> Json:
        return {
            "name": name,
            "model": name,
            "modified_at": self._modified_at,
            "size": self._size,
            "digest": hashlib.sha256(self._serving.fingerprint.encode()).hexdigest(),
            "details": self._details(),
        }

    def _details(self) -> Json:
        model = self._serving.config.model
        return {
            "parent_model": "",
            "format": "gguf" if model.path.endswith(".gguf") else "safetensors",
            "family": model.architecture,
            "families": [model.architecture],
            "parameter_size": "",
            "quantization_level": model.quantization or "",
        }
