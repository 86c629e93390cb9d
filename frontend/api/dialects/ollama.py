"""The routes of Ollama's API for chats, texts and embeddings. Streams are lines of JSON."""

from __future__ import annotations

import contextlib
import hashlib
import time
from abc import abstractmethod
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .... import __version__
from ....protocol.sampling_params import SamplingParams
from ...chat import ToolCallDelta
from ...client.embeddings import Vector
from ...client.engine_client import Delta, RequestGroup, Sequence
from ...http.errors import APIError, bad_request, json_response
from ...http.json_pieces import encode_list, encode_whole
from ..bodies.body import BodyDecoder
from ..bodies.intake import Intake
from ..chat_prompt import RenderedChat
from ..infill import require_infill
from ..logprobs import Json
from ..openapi import accepts
from ..prompts import verify_num_characters
from ..routes.chat_completions import ChatAnswer, ChatPlan
from ..routes.embeddings import Embeddings
from ..schema import ChatCompletionRequest, EmbeddingRequest
from ..schema.ollama import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
)
from ..serving import Serving
from ..streaming.event_stream import StreamFormat
from ..structured.constraint import Constraint
from ..tools.tool_choice import ToolChoice
from .anthropic import decode_input
from .dialect import DialectChunks, DialectEndpoint
from .ollama_request import (
    LATEST,
    OllamaPrompt,
    translate_chat,
    translate_generate,
)

PATH: Final = "/api/"

API_VERSION: Final = "0.13.0"
"""The version of Ollama whose API this is. Some clients refuse to work with earlier ones."""


def error_body(error: APIError, request_id: str) -> Json:
    """Return the body of an error in Ollama's form."""
    return {"error": error.message}


def _line(content: object) -> bytes:
    return encode_whole(content) + b"\n"


OLLAMA_STREAM: Final = StreamFormat(
    content_type=b"application/x-ndjson",
    # Every line must be an object.
    keep_alive=b"",
    done=b"",
    encode_error=lambda error: _line(error_body(error, "")),
)


def routes(serving: Serving, intake: Intake, embeddings: Embeddings) -> list[Route]:
    """Return all routes."""
    models = OllamaModels(serving, intake)
    embed = OllamaEmbeddings(serving, intake, embeddings)
    return [
        Route("/api/chat", OllamaChat(serving, intake), methods=["POST"]),
        Route("/api/generate", OllamaGenerate(serving, intake), methods=["POST"]),
        Route("/api/embed", embed.embed, methods=["POST"]),
        Route("/api/embeddings", embed.embed_one, methods=["POST"]),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.running),
        Route("/api/show", models.show, methods=["POST"]),
        Route("/api/pull", models.pull, methods=["POST"]),
        Route("/api/version", models.version),
    ]


def served_name(serving: Serving, name: str | None) -> str | None:
    """Return the name of a served model without the tag that clients append; other names as they are."""
    if name and name not in serving.served_models:
        return name.removesuffix(LATEST)
    return name


class OllamaChat(DialectEndpoint[OllamaChatRequest]):
    """The endpoint for chats."""

    def __init__(self, serving: Serving, intake: Intake) -> None:
        super().__init__(serving, intake, OllamaChatRequest)

    @property
    def answer_type(self) -> type[ChatAnswer]:
        """The class that writes answers."""
        return OllamaChatAnswer

    def translate(self, body: OllamaChatRequest) -> ChatCompletionRequest:
        """Return the same request as a chat completion."""
        return translate_chat(body, served_name(self._serving, body.model))

    def _greeting(self, request: ChatCompletionRequest) -> Json | None:
        return _loaded(request, {"message": {"role": "assistant", "content": ""}})

    def _sent_name(self, request: ChatCompletionRequest, name: str) -> str:
        return _option_name(name)


class OllamaGenerate(DialectEndpoint[OllamaGenerateRequest]):
    """The endpoint for single prompts."""

    def __init__(self, serving: Serving, intake: Intake) -> None:
        super().__init__(serving, intake, OllamaGenerateRequest)

    @property
    def answer_type(self) -> type[ChatAnswer]:
        """The class that writes answers."""
        return OllamaTextAnswer

    def translate(self, body: OllamaGenerateRequest) -> ChatCompletionRequest:
        """Return the same request as a chat completion."""
        return translate_generate(body, served_name(self._serving, body.model))

    def _greeting(self, request: ChatCompletionRequest) -> Json | None:
        return _loaded(request, {"response": ""})

    def _sent_name(self, request: ChatCompletionRequest, name: str) -> str:
        return _option_name(name)

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


def _loaded(request: ChatCompletionRequest, empty: Json) -> Json | None:
    """Return the answer to a request without a prompt, with which clients load a model."""
    assert isinstance(request, OllamaPrompt)
    if not request.is_empty:
        return None
    return _head(request.model or "") | empty | {"done": True, "done_reason": "load"}


def _option_name(name: str) -> str:
    """Return the name of the field that sets a sampling parameter."""
    names = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
    return f"options.{names.get(name, name)}"


def _head(model: str) -> Json:
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    return {"model": model, "created_at": now.replace("+00:00", "Z")}


class _OllamaAnswer(ChatAnswer):
    """An answer in Ollama's format, of which a chat and a text differ in one field."""

    @abstractmethod
    def fields(self, content: str, thinking: str, calls: list[Json]) -> Json:
        """Return the fields with a part of the answer."""

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        [output] = outputs
        message = self.choices[0].read_whole(output)
        calls = CallCollector()
        found = [*calls.add(message.tool_calls), *calls.finish()]
        return (
            self.head()
            | self.fields(message.content, message.reasoning, found)
            | self.logprobs(output)
            | self.ending(output)
        )

    def chunks(self) -> OllamaChunks:
        """Return the encoder of a stream."""
        return OllamaChunks(self)

    def head(self) -> Json:
        """Return the fields of every line."""
        return _head(self.request.model or str(self.envelope["model"]))

    def logprobs(self, delta: Delta) -> Json:
        """Return the log-probabilities of new tokens, if they were requested."""
        if not self.request.logprobs or delta.logprobs is None:
            return {}
        return {"logprobs": self.renderer.chat(delta.logprobs)["content"]}

    def ending(self, delta: Delta) -> Json:
        """Return the fields of the last line. Durations are in nanoseconds."""
        [sequence] = self._group.sequences
        end = sequence.last_token_time or time.monotonic()
        begin = sequence.scheduled_time or sequence.arrival_time
        first = sequence.first_token_time or end
        return {
            "done": True,
            "done_reason": "length" if delta.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(end - sequence.arrival_time),
            "load_duration": 0,
            "prompt_eval_count": sequence.num_prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - begin),
            "eval_count": sequence.num_read_tokens,
            "eval_duration": _nanoseconds(end - first),
        }


class OllamaChatAnswer(_OllamaAnswer):
    """The answer to one conversation."""

    def fields(self, content: str, thinking: str, calls: list[Json]) -> Json:
        """Return the message with a part of the answer."""
        message: Json = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class OllamaTextAnswer(_OllamaAnswer):
    """The answer to one prompt."""

    def fields(self, content: str, thinking: str, calls: list[Json]) -> Json:
        """Return the fields with a part of the answer."""
        return {"response": content} | ({"thinking": thinking} if thinking else {})


class CallCollector:
    """Collects the pieces of tool calls, because a line has whole calls only."""

    def __init__(self) -> None:
        self._open: ToolCallDelta | None = None
        self._arguments: list[str] = []

    def add(self, pieces: list[ToolCallDelta]) -> list[Json]:
        """Return the calls that the next pieces complete."""
        complete: list[Json] = []
        for piece in pieces:
            if self._open is not None and piece.index == self._open.index:
                self._arguments.append(piece.arguments)
            else:
                complete += self.finish()
                self._open, self._arguments = piece, [piece.arguments]
        return complete

    def finish(self) -> list[Json]:
        """Return the call whose end is now known."""
        call, self._open = self._open, None
        if call is None:
            return []
        function = {
            "index": call.index,
            "name": call.name,
            "arguments": decode_input("".join(self._arguments)),
        }
        return [{"id": call.id, "function": function}]


class OllamaChunks(DialectChunks):
    """Writes the lines of an answer."""

    format = OLLAMA_STREAM

    def __init__(self, answer: _OllamaAnswer) -> None:
        super().__init__(answer)
        self._message = answer
        self._calls = CallCollector()

    def encode(self, sequence: Sequence) -> bytes:
        """Return the lines for the new output.

        Raises:
            APIError: The sequence failed.
        """
        delta = self.read(sequence)
        answer, message = self._message, self.choice.read(delta)
        is_end = delta.finish_reason is not None
        calls = self._calls.add(message.tool_calls)
        calls += self._calls.finish() if is_end else []
        logprobs = answer.logprobs(delta)
        lines = b""
        if message.content or message.reasoning or calls or logprobs:
            fields = answer.fields(message.content, message.reasoning, calls)
            lines = _line(answer.head() | fields | logprobs | {"done": False})
        if is_end:
            lines += _line(answer.head() | answer.fields("", "", []) | answer.ending(delta))
        return lines

    def closing(self) -> bytes:
        """Return nothing: the last output ends the answer."""
        return b""


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


class OllamaEmbeddings:
    """The routes for embeddings."""

    def __init__(self, serving: Serving, intake: Intake, embeddings: Embeddings) -> None:
        self._serving = serving
        self._intake = intake
        self._embeddings = embeddings
        self._decoder = BodyDecoder(OllamaEmbedRequest, serving.config.frontend.strict)

    @accepts(OllamaEmbedRequest)
    async def embed(self, http: Request) -> Response:
        """Return an embedding of each input."""
        return await self._embed(http, is_one=False)

    @accepts(OllamaEmbedRequest)
    async def embed_one(self, http: Request) -> Response:
        """Return the embedding of a prompt."""
        return await self._embed(http, is_one=True)

    async def _embed(self, http: Request, *, is_one: bool) -> Response:
        begin = time.monotonic()
        with self._intake.lease() as lease:
            body, size = await self._intake.receive(http.scope, http.receive, self._decoder, lease)
            given = body.prompt if is_one and body.prompt is not None else body.input
            if given is None:
                name = "prompt" if is_one else "input"
                raise bad_request(name, f"{name} is required")
            request = EmbeddingRequest(
                model=served_name(self._serving, body.model),
                input=given if isinstance(given, str) else list(given),
                dimensions=body.dimensions,
                truncate_prompt_tokens=None if body.truncate is False else -1,
            )

            def answer(group: RequestGroup, vectors: Iterator[Vector]) -> Response:
                rows = (vector.tolist() for vector in vectors)
                if is_one:
                    return json_response({"embedding": next(rows)})
                return json_response(
                    {
                        "model": body.model or self._serving.served_name,
                        "embeddings": encode_list(rows, at_once=1),
                        "total_duration": _nanoseconds(time.monotonic() - begin),
                        "load_duration": 0,
                        "prompt_eval_count": sum(s.num_prompt_tokens for s in group.sequences),
                    }
                )

            return await self._embeddings.run(http, request, size, answer)


class OllamaModels:
    """The routes that describe the served models."""

    def __init__(self, serving: Serving, intake: Intake) -> None:
        self._serving = serving
        self._intake = intake
        self._decoder = BodyDecoder(OllamaModelRequest, serving.config.frontend.strict)
        self._digest = hashlib.sha256(serving.fingerprint.encode()).hexdigest()
        self._size = sum(file.size for file in serving.config.model.weight_files)
        modified = max((file.modified_ns for file in serving.config.model.weight_files), default=0)
        when = datetime.fromtimestamp(modified / 1e9 or time.time(), UTC)
        self._modified_at = when.isoformat(timespec="microseconds").replace("+00:00", "Z")

    async def tags(self, request: Request) -> Response:
        """List the served models."""
        cards = [self._card(name) for name in self._serving.served_models]
        return json_response({"models": cards})

    async def running(self, request: Request) -> Response:
        """List the loaded models, which are those that are served."""
        loaded = {
            "expires_at": "9999-12-31T23:59:59Z",
            "size_vram": 0,
            "context_length": self._serving.config.model.max_model_len,
        }
        cards = [self._card(name) | loaded for name in self._serving.served_models]
        return json_response({"models": cards})

    @accepts(OllamaModelRequest)
    async def show(self, http: Request) -> Response:
        """Describe one served model."""
        name = await self._name_in(http)
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
                "capabilities": self._capabilities(),
                "modified_at": self._modified_at,
            }
        )

    @accepts(OllamaModelRequest)
    async def pull(self, http: Request) -> Response:
        """Report that a served model is here; others cannot be loaded into a running server."""
        await self._name_in(http)
        return json_response({"status": "success"})

    async def version(self, request: Request) -> Response:
        """Return the version of the API, and that of Engine."""
        return json_response({"version": API_VERSION, "engine": __version__})

    async def _name_in(self, http: Request) -> str:
        """Return the served name in a body.

        Raises:
            APIError: No model is named (400), or it is not served (404).
        """
        with self._intake.lease() as lease:
            body, _ = await self._intake.receive(http.scope, http.receive, self._decoder, lease)
        name = served_name(self._serving, body.model or body.name)
        if not name:
            raise bad_request("model", "model is required")
        self._serving.verify_model(name)
        return name

    def _card(self, name: str) -> Json:
        return {
            "name": name,
            "model": name,
            "modified_at": self._modified_at,
            "size": self._size,
            "digest": self._digest,
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

    def _capabilities(self) -> list[str]:
        serving, model = self._serving, self._serving.config.model
        if not model.generates:
            return ["embedding"]
        found = ["completion"]
        if serving.calls_tools:
            found.append("tools")
        if serving.separates_reasoning:
            found.append("thinking")
        if serving.config.model.images is not None and serving.media is not None:
            found.append("vision")
        return found
