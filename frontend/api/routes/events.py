"""Routes that stream a recorded request: `GET /v1/chat/completions/{id}/events` and others, and llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....protocol.store.requests import RequestUpdate
from ...http.errors import APIError, bad_request, echo, json_response
from ...http.routing import Asgi
from ..bodies.intake import RouteHandlers, reads
from ..dialects.sglang.operations import abort
from ..durable.event_positions import HEADER, POSITION, EventPosition, read_last_event_id
from ..durable.records import RequestRecord, conversation_key, decode_record
from ..durable.resumption import find_resumption
from ..endpoint import Endpoint
from ..logprobs import Json
from ..schema.llama_cpp import LlamaStreamsRequest
from ..serving import Serving

MAX_CONVERSATIONS: Final = 1024
"""Maximum number of conversations in one lookup."""


class Events:
    """The stream of a recorded request, as an ASGI application.

    Args:
        serving: The state that the endpoints share.
        endpoint: The endpoint that answered the request.
        recorded_id: Returns the recorded ID of the answer with a given ID.
    """

    def __init__(
        self,
        serving: Serving,
        endpoint: Endpoint[Any],
        recorded_id: Callable[[str], str] = str,
    ) -> None:
        self._serving = serving
        self._endpoint = endpoint
        self._recorded_id = recorded_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events of a recorded request that follow the one named by Last-Event-ID, or all of them."""
        _verify_recording(self._serving)
        request_id = self._recorded_id(Request(scope).path_params["id"])
        position = read_last_event_id(scope) or EventPosition(request_id)
        if position.request_id != request_id:
            raise bad_request(
                HEADER,
                f"does not belong to the request in the path, but to {echo(position.request_id)}",
            )
        owner = scope["state"]["owner"]
        found = await find_resumption(self._serving, request_id, owner, position)
        with found:
            await self._endpoint.resume(found, Asgi(scope, receive, send))


class ConversationStream:
    """`GET /v1/stream`, which streams the last request of a conversation (`X-Conversation-Id`), as an ASGI application.

    Args:
        serving: The state that the endpoints share.
        endpoints: Path without `/v1` -> the endpoint that answered requests there.
    """

    def __init__(self, serving: Serving, endpoints: Mapping[str, Endpoint[Any]]) -> None:
        self._serving = serving
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events of the request, and those that follow."""
        _verify_recording(self._serving)
        query, owner = Request(scope).query_params, scope["state"]["owner"]
        key = conversation_key(query.get("conv_id", ""), "conv_id")
        if (start := query.get("from") or "0") != "0":
            # Answers are written anew from tokens, so the bytes before a position may differ.
            raise bad_request(
                "from", f"must be 0, because events are written anew, got {echo(start)}"
            )
        # Another frontend may have begun this response. Then the conversation may already have another request.
        position: EventPosition | None = scope["state"].get(POSITION)
        if position is None:
            position = EventPosition(await self._serving.store.find_key(owner, key))
        if not position.request_id:
            raise APIError(404, f"The conversation {echo(key[1:])} has no stream")
        with await find_resumption(self._serving, position.request_id, owner, position) as found:
            endpoint = self._endpoints[found.record.path.removeprefix("/v1")]
            await endpoint.resume(found, Asgi(scope, receive, send))


class ConversationStreams(RouteHandlers):
    """llama.cpp's routes that describe and stop the requests of conversations."""

    @reads(LlamaStreamsRequest)
    async def look_up(self, http: Request, body: LlamaStreamsRequest, size: int) -> Response:
        """Describe the last request of each of the given conversations that has one."""
        _verify_recording(self._serving)
        given = body.conversation_ids or []
        if len(given) > MAX_CONVERSATIONS:
            raise bad_request(
                "conversation_ids", f"must have at most {MAX_CONVERSATIONS} IDs, got {len(given)}"
            )
        found: list[Json] = []
        for i, conversation in enumerate(given):
            key = conversation_key(conversation, f"conversation_ids[{i}]")
            if (request := await self._find(http, key)) is not None:
                record, is_done = request
                found.append(
                    {
                        "conversation_id": conversation,
                        "is_done": is_done,
                        "total_bytes": 0,
                        "started_at": record.created,
                        "completed_at": 0,
                    }
                )
        return json_response(found)

    async def stop(self, http: Request) -> Response:
        """Abort the request of a conversation, and delete its entry."""
        _verify_recording(self._serving)
        key = conversation_key(http.query_params.get("conv_id", ""), "conv_id")
        if (found := await self._find(http, key)) is not None:
            record, is_done = found
            if not is_done:
                await abort(self._serving, record.request_id)
            self._serving.store.release_key(http.state.owner, key)
        return Response(status_code=204)

    async def _find(self, http: Request, key: str) -> tuple[RequestRecord, bool] | None:
        """Return the request that was begun with a key, and whether it has ended; None if there is none.

        Raises:
            StoreError: The store does not answer (503).
        """
        store, owner = self._serving.store, http.state.owner
        request_id = await store.find_key(owner, key)
        has_ended: list[bool] = []

        def look(update: RequestUpdate) -> None:
            has_ended[:] = [stream.end is not None for stream in update.streams]

        attachment = await store.attach(request_id, owner, look) if request_id else None
        if attachment is None:
            return None
        attachment.close()
        return decode_record(attachment.record), all(has_ended)


def _verify_recording(serving: Serving) -> None:
    """Raise APIError 404 if the server does not record requests."""
    if not serving.config.store.keeps_requests:
        raise APIError(
            404,
            "This server does not record requests; start it with --store PATH or --resume-grace SECONDS",
        )
