"""The ASGI application of a router: its own routes, and all others, which the servers of its models answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import chain
from typing import Final

import msgspec
from starlette._utils import get_route_path
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ... import __version__
from ...protocol.config import FrontendConfig
from ...protocol.errors import EngineError
from ..api.bodies.body import read_body
from ..api.bodies.request_memory import RequestMemory
from ..api.dialects.ollama import API_VERSION, NEVER_EXPIRES
from ..api.dialects.ollama_answer import answer_without_prompt
from ..api.dialects.ollama_request import UNLOAD
from ..api.edge import Edge
from ..api.logprobs import Json
from ..api.route_tables.others import ERROR_BODIES
from ..http.access import Access, Origins
from ..http.errors import APIError, bad_request, echo, json_response, unavailable
from ..http.middleware import add_middleware
from .children import Child, Children, State
from .names import find_name, is_unload
from .proxy import Connections, ask, find_only, is_websocket, pass_on, pass_on_websocket

PROBES: Final = ("/health", "/v1/health", "/livez", "/readyz", "/ready", "/ping")

_LARGE_BYTES: Final = 1 << 18
"""Size of bodies that a thread parses, because it takes more than a millisecond."""

_DESCRIPTION: Final = "/v1/models/"

_STREAM: Final = "/v1/stream"

_OF_ONE_MODEL: Final = ("/metrics", "/props", _STREAM)
"""Paths of the router that a model answers if the query names it."""

_TRUE: Final = ("1", "true")
"""Values of parameters in a query that are true."""

RETRY_S: Final = 5.0
"""Seconds after which a client may ask again for a model that did not load."""


class RouterApp:
    """Answers requests.

    A request goes to the model that it names. One without a name goes to the first model of the file; if it has no body
    either, such as that for a stored response, to each loaded model until one knows the object. The stream of a
    conversation with several models is only sent if the request names one of them. Unless `autoloads`, a request does
    not load its model, but `autoload=true` in the query does so.
    """

    def __init__(self, children: Children, config: FrontendConfig, *, autoloads: bool) -> None:
        self._children = children
        self._autoloads = autoloads
        self._connections = Connections()
        self._max_bytes = config.max_body_bytes
        self._memory = RequestMemory(max(config.max_request_memory, 2 * config.max_body_bytes))
        self._created = int(time.time())
        self._own: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
            ("POST", "/models/load"): self._load,
            ("POST", "/models/unload"): self._unload,
            ("GET", "/models/sse"): self._events,
            ("GET", "/api/version"): self._version,
            ("GET", "/props"): self._props,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/v1/streams/lookup"): self._look_up_streams,
            ("DELETE", _STREAM): self._stop_stream,
            **dict.fromkeys((("GET", path) for path in ("/v1/models", "/models")), self._list),
            **dict.fromkeys((("GET", path) for path in ("/api/tags", "/api/ps")), self._tags),
            **dict.fromkeys((("GET", path) for path in PROBES), self._health),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on to the server of its model."""
        method, path = scope["method"], get_route_path(scope)
        own = self._own.get((method, path))
        if method == "GET" and path.startswith(_DESCRIPTION) and ":" not in path:
            own = self._describe
        is_of_model = path in _OF_ONE_MODEL and bool(self._name_in_query(scope))
        if own is not None and not is_of_model:
            response = await own(Request(scope, receive))
            await response(scope, receive, send)
            return
        with self._memory.lease() as lease:
            read = await read_body(scope, receive, self._max_bytes, lease, is_json=False)
            body = read.join()
            if path == _STREAM:
                name = self._name_in_query(scope)
            elif len(body) > _LARGE_BYTES:
                name = await asyncio.to_thread(find_name, scope, body)
            else:
                name = find_name(scope, body)
            candidates = [self._find(name)] if name else self._without_name(body)
            if len(body) <= _LARGE_BYTES and is_unload(scope, body):
                await self._children.unload(candidates[0])
                response = json_response(answer_without_prompt(path, name, UNLOAD))
                await response(scope, receive, send)
                return
            self._verify_loaded(candidates[0], scope)
            try:
                if is_websocket(scope):
                    size, new_lease = self._max_bytes, self._memory.lease
                    await pass_on_websocket(
                        self._children, candidates[0], scope, send, size, new_lease
                    )
                else:
                    if path == _STREAM and len(candidates) > 1:
                        candidates = [
                            await find_only(self._children, self._connections, candidates, scope)
                        ]
                    await pass_on(
                        self._children, self._connections, candidates, body, scope, receive, send
                    )
            except EngineError as error:
                raise unavailable(str(error), RETRY_S) from None

    def _without_name(self, body: bytes) -> list[Child]:
        first = self._children.all[0]
        return (not body and self._children.loaded) or [first]

    def _name_in_query(self, scope: Scope) -> str:
        """Return the model that a query names, by `model` or at the end of `conv_id`; "" if it names none."""
        query = QueryParams(scope["query_string"])
        name = query.get("conv_id", "").partition("::")[2]
        return query.get("model") or (name if self._children.find(name) else "")

    def _find(self, name: str) -> Child:
        child = self._children.find(name)
        if child is None:
            names = ", ".join(each.model.name for each in self._children.all)
            raise APIError(
                404,
                f"The model {echo(name)} does not exist; available models: {names}",
                param="model",
                code="model_not_found",
            )
        return child

    def _verify_loaded(self, child: Child, scope: Scope) -> None:
        """Raise APIError 400 if a request may not load its model, and the model is not loaded."""
        wanted = QueryParams(scope["query_string"]).get("autoload")
        autoloads = self._autoloads if wanted is None else wanted in _TRUE
        if not autoloads and not child.has_server:
            raise bad_request(
                "model", f"{echo(child.model.name)} is not loaded; load it by POST /models/load"
            )

    def _card(self, child: Child, name: str) -> Json:
        card: Json = {"id": name, "object": "model", "created": self._created, "owned_by": "engine"}
        return card | {"status": {"value": child.state, "failed": child.state is State.FAILED}}

    async def _list(self, request: Request) -> Response:
        """List the models, with `reload=1` in the query after the file was read again."""
        if request.query_params.get("reload") in _TRUE:
            try:
                await self._children.reload()
            except EngineError as error:
                raise APIError(500, str(error), type="server_error") from None
        cards = [self._card(child, name) for child in self._children.all for name in child.names]
        return json_response({"object": "list", "data": cards})

    async def _describe(self, request: Request) -> Response:
        name = get_route_path(request.scope).removeprefix(_DESCRIPTION)
        return json_response(self._card(self._find(name), name))

    async def _events(self, request: Request) -> Response:
        """Stream changes of the models, until the client or the router ends."""

        async def events() -> AsyncIterator[bytes]:
            with self._children.subscribe() as queue:
                # The client receives the headers, and knows that it misses nothing from now on.
                yield b": subscribed\n\n"
                while (event := await queue.get()) is not None:
                    yield b"data: " + msgspec.json.encode(event) + b"\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _load(self, request: Request) -> Response:
        try:
            await self._children.load(await self._model_of(request))
        except EngineError as error:
            raise APIError(500, str(error), type="server_error") from None
        return json_response({"success": True})

    async def _unload(self, request: Request) -> Response:
        await self._children.unload(await self._model_of(request))
        return json_response({"success": True})

    async def _model_of(self, request: Request) -> Child:
        with self._memory.lease() as lease:
            body = await read_body(request.scope, request.receive, self._max_bytes, lease)
            name = find_name(request.scope, body.join())
        if not name:
            raise bad_request("model", "is required")
        return self._find(name)

    async def _look_up_streams(self, request: Request) -> Response:
        """Describe the last answers of conversations with all loaded models."""
        answers = await self._ask_loaded(request)
        lists = [each.body for each in answers if each.status_code == 200]
        if not lists:
            return answers[0]
        found = sorted(chain.from_iterable(map(msgspec.json.decode, lists)), key=_started_at)
        return json_response(list({each["conversation_id"]: each for each in found}.values()))

    async def _stop_stream(self, request: Request) -> Response:
        """Abort the answer of a conversation with any loaded model. Servers without it answer in the same way."""
        return min(await self._ask_loaded(request), key=lambda answer: answer.status_code)

    async def _ask_loaded(self, request: Request) -> list[Response]:
        """Return the answers of all loaded models; that of the first model of the file if none is loaded."""
        children = self._children.loaded or self._children.all[:1]
        self._verify_loaded(children[0], request.scope)
        with self._memory.lease() as lease:
            body = await read_body(request.scope, request.receive, self._max_bytes, lease)
            answering = (
                ask(self._children, self._connections, child, body.join(), request.scope)
                for child in children
            )
            try:
                return await asyncio.gather(*answering)
            except EngineError as error:
                raise unavailable(str(error), RETRY_S) from None

    async def _tags(self, request: Request) -> Response:
        """List all models, or those that are loaded, as Ollama does."""
        all_models = get_route_path(request.scope) == "/api/tags"
        shown = self._children.all if all_models else self._children.loaded
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        empty: Json = {"modified_at": when, "size": 0, "digest": "", "details": {}}
        cards = [
            {"name": name, "model": name}
            | empty
            | ({} if all_models else self._loaded_fields(child))
            for child in shown
            for name in child.names
        ]
        return json_response({"models": cards})

    def _loaded_fields(self, child: Child) -> Json:
        when = self._children.unload_time(child)
        if when is None:
            return {"expires_at": NEVER_EXPIRES, "size_vram": 0}
        expires_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))
        return {"expires_at": expires_at, "size_vram": 0}

    async def _props(self, request: Request) -> Response:
        """Describe the router to llama.cpp's web page and clients."""
        return json_response(
            {
                "role": "router",
                "max_instances": self._children.max_loaded,
                "models_autoload": self._autoloads,
                "model_alias": "engine",
                "model_path": "none",
                "default_generation_settings": {"params": None, "n_ctx": 0},
                "build_info": f"engine-{__version__}",
            }
        )

    async def _version(self, request: Request) -> Response:
        return json_response({"version": API_VERSION, "engine": __version__})

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        """Return the states of all models; the metrics of one if the query names it."""
        lines = ["# TYPE engine:router_model_loaded gauge"]
        for child in self._children.all:
            is_loaded = int(child.state is State.LOADED)
            lines.append(
                f'engine:router_model_loaded{{model_name="{child.model.name}"}} {is_loaded}'
            )
        lines.append("# TYPE engine:router_requests_running gauge")
        for child in self._children.all:
            labels = f'{{model_name="{child.model.name}"}}'
            lines.append(f"engine:router_requests_running{labels} {child.num_running}")
        return PlainTextResponse("\n".join(lines) + "\n")


def _started_at(description: Json) -> int:
    return int(description["started_at"])


def create_app(
    children: Children,
    config: FrontendConfig,
    *,
    autoloads: bool,
    is_loopback: bool,
    is_open: Callable[[], bool],
) -> ASGIApp:
    """Return the application.

    Args:
        children: The models.
        config: The configuration of the connections and of the access.
        autoloads: True if a request loads its model.
        is_loopback: True if the router listens on a loopback address.
        is_open: Returns False once the router shuts down.
    """
    access = Access(config, is_loopback=is_loopback)
    app = RouterApp(children, config, autoloads=autoloads)
    edge: ASGIApp = Edge(app, access, config.root_path, ERROR_BODIES, is_open)
    return Origins(add_middleware(edge, config.middleware), config, is_loopback=is_loopback)
