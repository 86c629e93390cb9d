"""Record a response whose client waits for it, so that another frontend can continue it on the same connection."""

from __future__ import annotations

import msgspec
from starlette._utils import get_route_path

from ...http.connection import Connection
from ...http.routing import Asgi
from ..durable.keeper import Keeper
from ..durable.records import RequestRecord
from ..generation import Origin, PreparedPrompt
from ..schema.responses import ResponsesRequest
from ..serving import Serving
from .request import Exchange
from .states import ResponseStates


class ResponseRecord(msgspec.Struct):
    """The data with which a response can be prepared again."""

    response_id: str
    body: ResponsesRequest


class ResponseKeeper(Keeper):
    """Records one response. Its events then have one token each, so another frontend writes the same events."""

    def __init__(self, serving: Serving, asgi: Asgi, exchange: Exchange) -> None:
        # Clients on a WebSocket, and of other dialects, do not get these events.
        is_own = isinstance(asgi.state["connection"], Connection)
        shows_more = exchange.only_prepares or bool(exchange.body.return_progress)
        super().__init__(serving, asgi.scope, is_on=is_own and not shows_more)
        self._exchange = exchange
        self._path = get_route_path(asgi.scope)
        exchange.is_recorded = self.is_on

    def make_record(
        self, prompts: list[PreparedPrompt], *, prefix: str, fingerprint: str, origin: Origin
    ) -> RequestRecord:
        """Return the record of a response, still without seeds."""
        exchange = self._exchange
        record = super().make_record(prompts, prefix=prefix, fingerprint=fingerprint, origin=origin)
        if not self.is_on:
            return record
        return msgspec.structs.replace(
            record,
            path=self._path,
            body=msgspec.json.encode(ResponseRecord(exchange.response_id, exchange.body)),
            answer_id=exchange.response_id,
            created=exchange.created_at,
        )


async def read_exchange(record: RequestRecord, states: ResponseStates, owner: str) -> Exchange:
    """Return the request of a record, with the items that it takes from the store.

    Raises:
        APIError: An object that the request refers to was deleted (404), or the store does not answer (503).
    """
    saved = msgspec.json.decode(record.body, type=ResponseRecord)
    context, items = await states.read_items(saved.body, saved.response_id, owner)
    return Exchange(
        saved.body, saved.response_id, record.created, items, context, owner, is_recorded=True
    )
