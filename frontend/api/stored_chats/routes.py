"""The routes of stored chat completions."""

from __future__ import annotations

import re
from typing import Final

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from ...http.errors import bad_request, json_response
from ...http.json_pieces import EncodedJSON
from ...http.routing import Route
from ..bodies.intake import Intake, RouteHandlers, reads
from ..logprobs import Json
from ..schema.files import MetadataRequest
from ..serving import Serving
from ..stored.metadata import verify_metadata
from ..stored.pages import cut_page, list_body, parse_page
from ..stored.records import key_of, owner_of
from .records import ChatFilter, ChatRecords

_METADATA: Final = re.compile(r"metadata\[(.*)\]")


class StoredChats(RouteHandlers):
    """Reads, changes and deletes stored chat completions."""

    def __init__(self, serving: Serving, intake: Intake, records: ChatRecords) -> None:
        super().__init__(serving, intake)
        self._records = records

    async def list(self, request: Request) -> Response:
        """List chat completions, the oldest first. The query may filter by model and metadata."""
        page = parse_page(request.query_params, order="asc")
        wanted = _parse_filter(request.query_params)
        found, has_more = await self._records.list_page(owner_of(request), page, wanted)
        body = list_body([{"id": entry.id} for entry, _ in found], has_more)
        body["data"] = EncodedJSON(b"[", (answer for _, answer in found), b"]")
        return json_response(body)

    async def retrieve(self, request: Request) -> Response:
        """Return a chat completion."""
        answer = await self._records.get(*key_of(request))
        return Response(answer, media_type="application/json")

    @reads(MetadataRequest)
    async def update(self, request: Request, body: MetadataRequest, size: int) -> Response:
        """Replace the metadata of a chat completion, and return it."""
        if body.metadata is None:
            raise bad_request("metadata", "is required")
        verify_metadata(body.metadata)
        entry = await self._records.get_entry(*key_of(request))
        changed = msgspec.structs.replace(entry, metadata=body.metadata)
        await self._records.update(changed, owner_of(request))
        return await self.retrieve(request)

    async def delete(self, request: Request) -> Response:
        """Delete a chat completion."""
        identifier, owner = key_of(request)
        await self._records.delete(identifier, owner)
        return json_response(
            {"object": "chat.completion.deleted", "id": identifier, "deleted": True}
        )

    async def messages(self, request: Request) -> Response:
        """List the messages that a chat completion answers."""
        identifier, owner = key_of(request)
        page = parse_page(request.query_params, order="asc")
        messages = await self._records.get_messages(identifier, owner)

        def describe() -> Response:
            items = [
                _describe(message, f"{identifier}-{i}")
                for i, message in enumerate(msgspec.json.decode(messages))
            ]
            return json_response(list_body(*cut_page(items, page, "The message")))

        return await self._serving.executor.run(len(messages), describe)


def chat_routes(serving: Serving, intake: Intake, records: ChatRecords) -> list[Route]:
    """Return the routes, except `POST /chat/completions`."""
    chats = StoredChats(serving, intake, records)
    one = "/chat/completions/{id}"
    return [
        Route("/chat/completions", chats.list),
        Route(one, chats.retrieve),
        Route(one, chats.update),
        Route(one, chats.delete, methods=["DELETE"]),
        Route(f"{one}/messages", chats.messages),
    ]


def _parse_filter(query: QueryParams) -> ChatFilter:
    """Return the filter that a query describes.

    Raises:
        APIError: The metadata has too many or too large entries (400).
    """
    metadata = {
        match[1]: value
        for name, value in query.multi_items()
        if (match := _METADATA.fullmatch(name)) is not None
    }
    verify_metadata(metadata)
    return ChatFilter(query.get("model"), metadata)


def _describe(message: Json, identifier: str) -> Json:
    """Return a message as a list shows it: with an ID, and with the parts of its content in `content_parts`."""
    content = message.get("content")
    is_text = content is None or isinstance(content, str)
    return message | {
        "id": identifier,
        "content": content if is_text else None,
        "content_parts": None if is_text else content,
    }
