"""The routes of stored responses: read, delete, cancel, and list the input items."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...http.errors import APIError, bad_request, echo, json_response, wrong
from ...http.routing import Asgi
from ..logprobs import Json
from ..numbers import parse_number
from ..stored.pages import cut_page, list_body, parse_page
from ..stored.records import key_of, not_found
from .background import BackgroundRuns
from .events import read_run, read_stored, repeat_events, send_events
from .request import verify_include
from .states import ENDED, ResponseStates

CANCEL_S: Final = 10.0
"""Maximum seconds that a cancel request waits for the end of the response."""
CANCEL_POLL_S: Final = 0.1
"""Seconds between checks of a response that another frontend runs."""


class StoredResponses:
    """Reads, cancels and deletes stored responses."""

    def __init__(self, states: ResponseStates, runs: BackgroundRuns) -> None:
        self._states = states
        self._runs = runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a response, or its events, or delete it."""
        request = Request(scope, receive)
        identifier, owner = key_of(request)
        if scope["method"] == "DELETE":
            await (await self._delete(identifier, owner))(scope, receive, send)
            return
        verify_include(request.query_params)
        record = await self._find(identifier, owner)
        if not _is_true(request, "stream"):
            if "starting_after" in request.query_params:
                raise bad_request("starting_after", "needs stream=true")
            await json_response(record["response"])(scope, receive, send)
            return
        first = _first_event(request)
        if (run := self._runs.find(identifier, owner)) is not None:
            events = read_run(run, first)
        elif record["has_events"]:
            events = read_stored(self._states, identifier, owner, first)
        elif record["response"]["status"] in ENDED:
            events = repeat_events(record["response"], first)
        else:
            raise bad_request(
                "stream",
                "needs a response that was created with stream=true or has finished",
            )
        await send_events(events, Asgi(scope, receive, send))

    async def cancel(self, request: Request) -> Response:
        """Cancel a background response, and return it."""
        identifier, owner = key_of(request)
        response = await self._read(identifier, owner)
        if not response["background"]:
            raise APIError(
                400,
                f"Cannot cancel a synchronous response. {echo(identifier)} does not run in the background",
                param="id",
            )
        if response["status"] not in ENDED:
            run = self._runs.find(identifier, owner)
            if run is not None:
                run.cancel()
            else:
                await self._states.cancellations.put(identifier, {}, owner)
            response = await self._wait_for_end(identifier, owner, response)
        return json_response(response)

    async def input_items(self, request: Request) -> Response:
        """List the items that a response was given."""
        verify_include(request.query_params)
        identifier, owner = key_of(request)
        page = parse_page(request.query_params)
        record = await self._states.responses.get(identifier, owner)
        earlier = record["response"]["previous_response_id"]
        items = record["input"]
        if earlier is not None:
            items = await self._states.read_earlier(earlier, owner) + items
        return json_response(list_body(*cut_page(items, page, "The item")))

    async def _find(self, identifier: str, owner: str) -> Json:
        """Return the stored response. If its run was lost, it is marked as failed first."""
        record: Json = await self._states.responses.get(identifier, owner)
        if record["response"]["status"] not in ENDED:
            await self._runs.fail_if_lost(identifier, owner, record["response"])
            # The response may also have ended meanwhile.
            record = await self._states.responses.get(identifier, owner)
        return record

    async def _read(self, identifier: str, owner: str) -> Json:
        response: Json = (await self._find(identifier, owner))["response"]
        return response

    async def _wait_for_end(self, identifier: str, owner: str, response: Json) -> Json:
        deadline = asyncio.get_running_loop().time() + CANCEL_S
        while response["status"] not in ENDED and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(CANCEL_POLL_S)
            response = await self._read(identifier, owner)
        return response

    async def _delete(self, identifier: str, owner: str) -> Response:
        if (run := self._runs.find(identifier, owner)) is not None:
            run.cancel()
        if not await self._states.responses.delete(identifier, owner):
            raise not_found("Response with id", identifier)
        await self._states.events.delete_children(identifier, owner)
        return json_response({"id": identifier, "object": "response", "deleted": True})


def _is_true(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise wrong(name, "true or false", text)
    return text in ("true", "1")


def _first_event(request: Request) -> int:
    text = request.query_params.get("starting_after")
    if text is None:
        return 0
    if (number := parse_number(text)) is None:
        raise wrong("starting_after", "the sequence_number of an event", text)
    return number + 1
