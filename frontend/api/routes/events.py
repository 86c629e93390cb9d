"""`GET /v1/chat/completions/{id}/events` and similar routes, which stream a recorded request from any position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ...http.errors import APIError, bad_request, echo
from ..durable.event_ids import HEADER, EventPosition, read_last_event_id
from ..durable.resumption import find_resumption
from ..endpoint import Endpoint
from ..serving import Serving


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
        if not self._serving.config.store.keeps_requests:
            raise APIError(
                404,
                "This server does not record requests; start it with --store PATH or --resume-grace SECONDS",
            )
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
            await self._endpoint.resume(found, scope, receive, send)
