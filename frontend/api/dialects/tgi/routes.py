"""The routes of Text Generation Inference.

`/generate` is also a route of SGLang's, and `/tokenize` one of vLLM's. A body with `inputs` has TGI's format.
"""

from __future__ import annotations

from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ..... import __version__
from .....protocol.errors import ParameterError
from .....protocol.sampling_params import MAX_N, MAX_STOP_STRINGS
from ....client.engine_client import RequestGroup
from ....http.errors import APIError, bad_request, json_response
from ....http.json_pieces import encode_list
from ....http.routing import Asgi, Route
from ...answer import Answer
from ...bodies.intake import Intake, RouteHandlers, reads
from ...bodies.request_memory import MemoryLease
from ...durable.records import replay_body
from ...endpoint import Endpoint, SharedEndpoint
from ...openapi import accepts
from ...routes.chat_completions import render_request
from ...routes.completions import Completions
from ...routes.invocations import field_names
from ...schema import ChatCompletionRequest, CompletionRequest
from ...schema.dialects.tgi import TgiRequest
from ...schema.sglang import SglangGenerateRequest
from ...serving import Serving
from ..sglang.generate import SglangGenerate
from ..sglang.request import SglangPrompt
from ..sglang.sessions import Sessions
from .answer import TgiAnswer
from .request import TgiError, TgiPrompt, translate
from .tokens import simple_tokens


class TgiGenerate(Completions):
    """The endpoint that completes a text. The answer is whole."""

    body_schema = TgiRequest
    streams: ClassVar[bool] = False
    answer_type = TgiAnswer

    async def _answer(self, asgi: Asgi, lease: MemoryLease) -> None:
        try:
            await super()._answer(asgi, lease)
        except (APIError, ParameterError) as error:
            raise _tgi_error(error) from None

    async def _translate(self, body: TgiRequest, size: int) -> CompletionRequest:
        return translate(body, stream=self.streams, is_compatible=False)


class TgiStream(TgiGenerate):
    """The endpoint that streams the answer."""

    streams = True


class TgiRoot(TgiGenerate):
    """The endpoint at `/`, which streams if the body asks for it, and else answers with a list."""

    async def _translate(self, body: TgiRequest, size: int) -> CompletionRequest:
        return translate(body, stream=bool(body.stream), is_compatible=True)


class GenerateRoute(SharedEndpoint[CompletionRequest]):
    """The endpoint `/generate`, which passes each body to that of TGI or of SGLang."""

    body_schema = SglangGenerateRequest | TgiRequest

    def __init__(self, serving: Serving, intake: Intake, sessions: Sessions) -> None:
        super().__init__(serving, intake)
        self._sglang = SglangGenerate(serving, intake, sessions)
        self._tgi = TgiGenerate(serving, intake)

    async def _answer(self, asgi: Asgi, lease: MemoryLease) -> None:
        try:
            await super()._answer(asgi, lease)
        except (APIError, ParameterError) as error:
            if asgi.state.get("is_tgi"):
                raise _tgi_error(error) from None
            raise

    async def _receive(self, asgi: Asgi, lease: MemoryLease) -> tuple[CompletionRequest, int]:
        body = await self._intake.receive_bytes(asgi)
        names = await self._serving.executor.run(len(body), field_names, body)
        asgi.state["is_tgi"] = is_tgi = "inputs" in names
        again = asgi._replace(receive=replay_body(body, asgi.receive))
        if not is_tgi:
            return await self._sglang.receive(again, lease)
        tgi, size = await self._intake.receive(again, TgiRequest, lease)
        return translate(tgi, stream=False, is_compatible=False), size

    def endpoint_of(self, request: CompletionRequest) -> Endpoint[CompletionRequest]:
        """Return the endpoint that answers a request."""
        return self._tgi if isinstance(request, TgiPrompt) else self._sglang

    async def _reply(
        self, answer: Answer[CompletionRequest], group: RequestGroup, asgi: Asgi
    ) -> None:
        request = answer.request
        if isinstance(request, SglangPrompt) and request.turn is not None:
            await self._sglang.reply(answer, group, asgi)
        else:
            await super()._reply(answer, group, asgi)


def _tgi_error(error: APIError | ParameterError) -> APIError:
    if isinstance(error, ParameterError):
        error = bad_request(error.param, error.problem)
    return TgiError(error)


class TgiDescription(RouteHandlers):
    """The routes that describe the server, and show the tokens of a conversation."""

    async def info(self, http: Request) -> Response:
        """Return the properties of the model and the limits of the server."""
        config = self._serving.config
        most = config.model.max_model_len
        return json_response(
            {
                "model_id": config.model.model,
                "model_sha": None,
                "model_pipeline_tag": "text-generation" if config.model.generates else None,
                "max_concurrent_requests": config.scheduler.max_num_seqs,
                "max_best_of": MAX_N,
                "max_stop_sequences": MAX_STOP_STRINGS,
                "max_input_tokens": most - 1,
                "max_total_tokens": most,
                "validation_workers": 1,
                "max_client_batch_size": 1,
                "router": "engine",
                "version": __version__,
                "sha": None,
                "docker_label": None,
            }
        )

    @accepts(ChatCompletionRequest)
    async def tokenize_chat(self, http: Request) -> Response:
        """Return the prompt of a conversation as text, and its tokens."""
        try:
            return await self._tokenize_chat(http)
        except (APIError, ParameterError) as error:
            raise _tgi_error(error) from None

    @reads(ChatCompletionRequest)
    async def _tokenize_chat(
        self, http: Request, request: ChatCompletionRequest, size: int
    ) -> Response:
        serving = self._serving
        serving.verify_model(request.model)
        serving.verify_tokenizer("messages")
        chat = await render_request(serving, request, size)
        text, token_ids = chat.text or "", list(chat.token_ids)

        def encode() -> Response:
            tokens = simple_tokens(serving.tokenizer, text, token_ids)
            listed = encode_list(tokens, at_once=1)
            return json_response({"tokenize_response": listed, "templated_text": text})

        return await serving.executor.run(len(token_ids), encode)


def routes(serving: Serving, intake: Intake, sessions: Sessions) -> list[Route]:
    """Return all routes except `/` and `/tokenize`."""
    description = TgiDescription(serving, intake)
    return [
        Route("/generate", GenerateRoute(serving, intake, sessions), methods=["POST", "PUT"]),
        Route("/generate_stream", TgiStream(serving, intake)),
        Route("/info", description.info),
        Route("/chat_tokenize", description.tokenize_chat),
    ]
