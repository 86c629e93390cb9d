"""The routes of conversations and their items."""

from __future__ import annotations

import time
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...http.errors import bad_request, json_response
from ..bodies.intake import Intake, RouteHandlers, reads
from ..logprobs import Json
from ..schema.responses import ConversationItemsRequest, ConversationRequest
from ..serving import Serving
from ..stored.metadata import verify_metadata
from ..stored.pages import list_body, parse_page
from ..stored.records import key_of, not_found, owner_of
from .ids import new_id
from .items import MessageBuilder, normalize_input
from .request import verify_include
from .states import ResponseStates

MAX_ITEMS_AT_ONCE: Final = 20
"""Maximum number of items in one request."""

T = TypeVar("T", bound=msgspec.Struct)


class Conversations(RouteHandlers):
    """Creates, reads, changes and deletes conversations."""

    def __init__(self, serving: Serving, intake: Intake, states: ResponseStates) -> None:
        super().__init__(serving, intake)
        self._states = states

    @reads(ConversationRequest)
    async def create(self, request: Request, body: ConversationRequest, size: int) -> Response:
        """Create a conversation."""
        verify_metadata(body.metadata)
        identifier, owner = new_id("conv"), owner_of(request)
        items = _read_items(body.items or [], identifier, 0)
        conversation = {
            "id": identifier,
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": body.metadata or {},
        }
        await self._put(conversation, len(items), owner)
        await self._states.add_items(identifier, items, owner)
        return json_response(conversation)

    async def retrieve(self, request: Request) -> Response:
        """Return a conversation."""
        record = await self._get(request)
        return json_response(record["conversation"])

    @reads(ConversationRequest)
    async def update(self, request: Request, body: ConversationRequest, size: int) -> Response:
        """Replace the metadata of a conversation."""
        verify_metadata(body.metadata)
        if body.items is not None:
            raise bad_request("items", "are added at /v1/conversations/{id}/items")
        record = await self._get(request)
        conversation = record["conversation"] | {"metadata": body.metadata or {}}
        await self._put(conversation, record["num_items"], owner_of(request))
        return json_response(conversation)

    async def delete(self, request: Request) -> Response:
        """Delete a conversation with its items."""
        identifier, owner = key_of(request)
        if not await self._states.conversations.delete(identifier, owner):
            raise not_found("The conversation", identifier)
        await self._states.items.delete_children(identifier, owner)
        return json_response({"id": identifier, "object": "conversation.deleted", "deleted": True})

    @reads(ConversationItemsRequest)
    async def add_items(
        self, request: Request, body: ConversationItemsRequest, size: int
    ) -> Response:
        """Add items to the end of a conversation."""
        verify_include(request.query_params)
        if not body.items:
            raise bad_request("items", "is required and must not be empty")
        record = await self._get(request)
        conversation, owner = record["conversation"], owner_of(request)
        items = _read_items(body.items, conversation["id"], record["num_items"])
        await self._put(conversation, record["num_items"] + len(items), owner)
        await self._states.add_items(conversation["id"], items, owner)
        return json_response(list_body(items, has_more=False))

    async def list_items(self, request: Request) -> Response:
        """List the items of a conversation."""
        verify_include(request.query_params)
        page = parse_page(request.query_params)
        record = await self._get(request)
        identifier = record["conversation"]["id"]
        found = await self._states.items.read_page(
            owner_of(request), page, identifier, prefix=f"{identifier}/"
        )
        return json_response(list_body(*found))

    async def retrieve_item(self, request: Request) -> Response:
        """Return an item of a conversation."""
        verify_include(request.query_params)
        item = await self._states.items.find(_item_key(request), owner_of(request))
        if item is None:
            raise not_found("The item", request.path_params["item_id"])
        return json_response(item)

    async def delete_item(self, request: Request) -> Response:
        """Delete an item of a conversation, and return the conversation."""
        if not await self._states.items.delete(_item_key(request), owner_of(request)):
            raise not_found("The item", request.path_params["item_id"])
        record = await self._get(request)
        return json_response(record["conversation"])

    async def _get(self, request: Request) -> Json:
        record: Json = await self._states.conversations.get(*key_of(request))
        return record

    async def _put(self, conversation: Json, num_items: int, owner: str) -> None:
        """Store a conversation.

        `num_items` is the number of items ever added, from which the next identifiers follow.
        """
        record = {"conversation": conversation, "num_items": num_items}
        await self._states.conversations.put(conversation["id"], record, owner)


def _read_items(given: list[Json], conversation: str, num_before: int) -> list[Json]:
    if len(given) > MAX_ITEMS_AT_ONCE:
        raise bad_request("items", f"must have at most {MAX_ITEMS_AT_ONCE} items, got {len(given)}")
    items = normalize_input(given, conversation, "items", num_before)
    # Reject items that a later response could not read.
    MessageBuilder().add_items(items, "items")
    return items


def _item_key(request: Request) -> str:
    return f"{request.path_params['id']}/{request.path_params['item_id']}"
