"""Google's Interactions API. An interaction is a response of the Responses API, which stores, runs and continues it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from ....http.errors import bad_request, json_response, renaming, wrong
from ....http.routing import Asgi, Route
from ...bodies.intake import Intake
from ...bodies.request_memory import MemoryLease
from ...logprobs import Json
from ...numbers import parse_number
from ...responses.background import BackgroundRuns
from ...responses.endpoint import Responses
from ...responses.states import ENDED, ResponseStates
from ...responses.stored import StoredResponses
from ...schema.interactions import InteractionRequest
from ...schema.responses import ResponsesRequest
from ...serving import Serving
from ...stored.records import key_of
from ...streaming.event_stream import ChunkWriter
from .interaction_answer import InteractionEvents, write_whole
from .interaction_request import sent_name, translate

PATHS: Final = ("/v1beta/interactions", "/v1/interactions")

Render = Callable[[bytes], Json]
"""Function from the body of a response to the body for the client."""


def routes(
    serving: Serving, intake: Intake, states: ResponseStates, runs: BackgroundRuns
) -> list[Route]:
    """Return all routes."""
    interactions = Interactions(serving, intake, states, runs)
    stored = StoredInteractions(serving, states, runs)
    return [
        route
        for path in PATHS
        for route in (
            Route(path, interactions),
            Route(f"{path}/{{id}}", stored, methods=["GET", "DELETE"]),
            Route(f"{path}/{{id}}/cancel", CancelledInteractions(stored), methods=["POST"]),
        )
    ]


class InteractionClient:
    """Stands in for the client of a response: for its connection, and for the function that sends to it.

    Args:
        serving: The state that the endpoints share.
        states: The stored responses.
        asgi: The client's request.
        render: Returns the body for the client if the response is not streamed.
        interaction_id: The identifier of the response; "" if it is new.
    """

    def __init__(
        self,
        serving: Serving,
        states: ResponseStates,
        asgi: Asgi,
        render: Render = write_whole,
        interaction_id: str = "",
    ) -> None:
        self._serving = serving
        self._states = states
        self._asgi = asgi
        self._render = render
        self._connection: ChunkWriter = asgi.state["connection"]
        self._events = InteractionEvents(interaction_id)
        self._is_streamed = False
        self._pieces: list[bytes] = []

    @property
    def asgi(self) -> Asgi:
        """The request, with this object as the connection."""
        state = {**self._asgi.state, "connection": self}
        return Asgi({**self._asgi.scope, "state": state}, self._asgi.receive, self.send)

    @property
    def has_chunks(self) -> bool:
        """False for HTTP/1.0."""
        return self._connection.has_chunks

    @property
    def is_paused(self) -> bool:
        """True while the client reads too slowly."""
        return self._connection.is_paused

    @property
    def on_writable(self) -> Callable[[], None] | None:
        """Called when the client reads again or disconnects."""
        return self._connection.on_writable

    @on_writable.setter
    def on_writable(self, callback: Callable[[], None] | None) -> None:
        self._connection.on_writable = callback

    def begin_stream(self) -> None:
        """Prepare the connection for a stream."""
        self._connection.begin_stream()

    def write_chunk(self, data: bytes) -> None:
        """Send events of the response as events of the interaction."""
        if translated := self._events.translate(data):
            self._connection.write_chunk(translated)

    async def send(self, message: Message) -> None:
        """Send a message of the response as one of the interaction."""
        if message["type"] == "http.response.start":
            content_type = dict(message["headers"]).get(b"content-type", b"")
            self._is_streamed = content_type.startswith(b"text/event-stream")
            if self._is_streamed:
                await self._asgi.send(message)
            return
        body, is_last = message.get("body", b""), not message.get("more_body")
        if not self._is_streamed:
            self._pieces.append(body)
            if is_last:
                await self._send_whole()
            return
        translated = self._events.translate(body)
        if is_last and (ending := translated + await self._ending()):
            await self._asgi.send({"type": message["type"], "body": ending, "more_body": True})
            translated = b""
        if translated or is_last:
            await self._asgi.send({**message, "body": translated})

    async def _send_whole(self) -> None:
        body = b"".join(self._pieces)
        content = await self._serving.executor.run(len(body), lambda: self._render(body))
        await json_response(content)(*self._asgi)

    async def _ending(self) -> bytes:
        """Return the last event if the response ended without one; else b""."""
        events = self._events
        if events.has_ended or not events.interaction_id:
            return b""
        owner = self._asgi.state["owner"]
        record = await self._states.responses.find(events.interaction_id, owner)
        if record is None or record["response"]["status"] not in ENDED:
            return b""
        return events.ending(msgspec.json.encode(record["response"]))


class Interactions(Responses):
    """The route that creates interactions."""

    body_schema: type[msgspec.Struct] = InteractionRequest

    def __init__(
        self, serving: Serving, intake: Intake, states: ResponseStates, runs: BackgroundRuns
    ) -> None:
        super().__init__(serving, intake, states)
        self.runs = runs

    async def _answer(self, asgi: Asgi, lease: MemoryLease) -> None:
        inner = InteractionClient(self._serving, self._states, asgi).asgi
        with renaming(lambda name: sent_name(inner.state.get(_BODY), name)):
            await super()._answer(inner, lease)

    async def _read(self, asgi: Asgi, lease: MemoryLease) -> tuple[ResponsesRequest, int]:
        body, size = await self._intake.receive(asgi, InteractionRequest, lease)
        asgi.state[_BODY] = body
        return await self._serving.executor.run(size, lambda: translate(body)), size


_BODY: Final = "interaction"
"""The entry of a request's state with its body."""


class StoredInteractions:
    """Reads, cancels and deletes stored interactions."""

    def __init__(self, serving: Serving, states: ResponseStates, runs: BackgroundRuns) -> None:
        self._serving = serving
        self._states = states
        self._stored = StoredResponses(states, runs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read an interaction, or its events, or delete it."""
        request = Request(scope)
        identifier, owner = key_of(request)
        render: Render = write_whole
        if scope["method"] == "DELETE":
            render = _empty
        elif _read_flag(request, "include_input"):
            record = await self._states.responses.get(identifier, owner)
            render = partial(write_whole, given=record["input"])
        query = {} if scope["method"] == "DELETE" else _read_position(request)
        inner = self._client(Asgi(scope, receive, send), render).asgi
        inner.scope["query_string"] = urlencode(query).encode()
        await self._stored(*inner)

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Cancel an interaction that runs in the background, and return it."""
        response = await self._stored.cancel(Request(scope, receive))
        await response(*self._client(Asgi(scope, receive, send), write_whole).asgi)

    def _client(self, asgi: Asgi, render: Render) -> InteractionClient:
        identifier = asgi.scope["path_params"]["id"]
        return InteractionClient(self._serving, self._states, asgi, render, identifier)


class CancelledInteractions:
    """The route that cancels interactions."""

    def __init__(self, stored: StoredInteractions) -> None:
        self._stored = stored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Cancel an interaction, and return it."""
        await self._stored.cancel(scope, receive, send)


def _empty(response: bytes) -> Json:
    """Return the body of an answer to a client that deleted an interaction."""
    return {}


def _read_flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false"):
        raise wrong(name, "true or false", text)
    return text == "true"


def _read_position(request: Request) -> dict[str, Any]:
    """Return the query that reads the same part of a response."""
    after = request.query_params.get("last_event_id")
    if not _read_flag(request, "stream"):
        if after is not None:
            raise bad_request("last_event_id", "needs stream=true")
        return {}
    if after is None:
        return {"stream": "true"}
    if parse_number(after) is None:
        raise wrong("last_event_id", "the event_id of an event", after)
    return {"stream": "true", "starting_after": after}
