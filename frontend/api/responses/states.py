"""Stored responses and conversations, and the items that a new response takes from them."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

from ...http.errors import APIError, bad_request, echo, renamer, renaming
from ...store.client import StoreClient
from ..bodies.request_memory import RequestMemory
from ..files.storage import FileStorage
from ..logprobs import Json
from ..schema.responses import ResponseFields, ResponsesRequest
from ..stored.records import MAX_OBJECTS_AT_ONCE, Page, Records, not_found
from .ids import new_id, owner_of_item
from .items import Files, find_files, normalize_input
from .request import Exchange, conversation_id

MAX_EARLIER: Final = 10_000
"""Maximum length of a chain of responses (`previous_response_id`)."""

ENDED: Final = ("completed", "incomplete", "failed", "cancelled")

KEPT: Final = "kept_responses"
"""The entry of a request's state with the responses that its WebSocket keeps; none for other requests."""

MAX_KEPT: Final = 4
"""Maximum number of responses that a WebSocket keeps."""


class KeptResponses:
    """The latest responses on one WebSocket, which its next response may continue even if they are not stored.

    Each is kept with all items that it continues.

    Args:
        memory: Counts the memory of the items. A response for which it has no room is not kept.
        max_bytes: Maximum size of the items.
    """

    def __init__(self, memory: RequestMemory, max_bytes: int) -> None:
        self._memory = memory
        self._max_bytes = max_bytes
        self._responses: dict[str, tuple[list[Json], int]] = {}
        self._num_bytes = 0

    def find(self, response_id: str) -> list[Json] | None:
        """Return the items of a response and of those that it continues, the earliest first; None if not kept."""
        found = self._responses.get(response_id)
        return None if found is None else found[0]

    def find_item(self, identifier: str) -> Json | None:
        """Return an item of a kept response; None if there is no such item."""
        for items, _ in self._responses.values():
            for item in items:
                if item["id"] == identifier:
                    return item
        return None

    def add(self, exchange: Exchange, response: Json) -> None:
        """Keep a response that has ended, instead of the oldest if there are too many."""
        items = [*exchange.context, *exchange.input, *response["output"]]
        size = sum(map(size_of, items))
        while self._responses and (
            len(self._responses) >= MAX_KEPT or self._num_bytes + size > self._max_bytes
        ):
            self._remove(next(iter(self._responses)))
        if size > self._max_bytes:
            return
        with contextlib.suppress(APIError):
            self._memory.count(size)
            self._num_bytes += size
            self._responses[exchange.response_id] = items, size

    def clear(self) -> None:
        """Release the memory of all responses."""
        for response_id in list(self._responses):
            self._remove(response_id)

    def _remove(self, response_id: str) -> None:
        _, size = self._responses.pop(response_id)
        self._num_bytes -= size
        self._memory.release(size)


class ResponseStates:
    """Reads and writes responses and conversations.

    A stored response has the fields `response`, as clients see it, and `input`, the items of its own request. Earlier
    items are stored with the response that it continues.

    Args:
        store: The client of the store.
        files: The stored files.
        max_bytes: The maximum size of the items that a response takes from the store.
    """

    def __init__(self, store: StoreClient, files: FileStorage, max_bytes: int) -> None:
        self._files = files
        self._max_bytes = max_bytes
        self.responses = Records(store, "response", "Response with id")
        self.events = Records(store, "response.event", "The event")
        self.cancellations = Records(store, "response.cancel", "Response with id")
        self.conversations = Records(store, "conversation", "The conversation")
        self.items = Records(store, "conversation.item", "The item")

    async def begin(
        self, body: ResponsesRequest, owner: str, kept: KeptResponses | None = None
    ) -> Exchange:
        """Return a new response with the items that it takes from the store, or from what its WebSocket keeps.

        Raises:
            APIError: An object that the request refers to does not exist (404), or the items are too large (400).
        """
        identifier = new_id("resp")
        context, items = await self.read_items(body, identifier, owner, kept)
        return Exchange(body, identifier, int(time.time()), items, context, owner, kept=kept)

    async def read_items(
        self,
        body: ResponseFields,
        identifier: str,
        owner: str,
        kept: KeptResponses | None = None,
    ) -> tuple[list[Json], list[Json]]:
        """Return the items before those of a request, and the items of the request itself.

        Raises:
            APIError: An object that the request refers to does not exist (404), or the items are too large (400).
        """
        conversation = conversation_id(body)
        items = normalize_input(body.input, identifier, "input")
        if any(item["type"] == "item_reference" for item in items):
            items = [await self._resolve(item, i, owner, kept) for i, item in enumerate(items)]
        if conversation is not None:
            with renaming(renamer({"id": "conversation"})):
                return await self._conversation_items(conversation, owner), items
        previous = body.previous_response_id
        if previous is None:
            return [], items
        if kept is not None and (earlier := kept.find(previous)) is not None:
            return earlier, items
        return await self.read_earlier(previous, owner), items

    async def load_files(self, items: list[Json], owner: str) -> Files:
        """Return the stored files that items refer to.

        Raises:
            APIError: A file does not exist (404), or the files are too large in total (400).
        """
        files: dict[str, tuple[str, bytes]] = {}
        num_bytes = 0
        for identifier in sorted(find_files(items)):
            with renaming(renamer({"id": "input"})):
                file = await self._files.get(identifier, owner)
            num_bytes += file["bytes"]
            if num_bytes > self._max_bytes:
                raise bad_request(
                    "input",
                    f"has files of {num_bytes} bytes, but at most {self._max_bytes} are allowed "
                    "(--max-body-bytes)",
                )
            files[identifier] = file["filename"], await self._files.read(identifier, owner)
        return files

    async def save(self, exchange: Exchange, response: Json) -> None:
        """Store a response (unless the client set `store: false`). If it has ended, add it to its conversation.

        Raises:
            APIError: The store does not answer (503).
        """
        if exchange.body.store is not False:
            record = {
                "response": response,
                "input": exchange.input,
                "has_events": bool(exchange.body.background and exchange.body.stream),
            }
            await self.responses.put(exchange.response_id, record, exchange.owner)
        conversation = conversation_id(exchange.body)
        if conversation is not None and response["status"] in ("completed", "incomplete"):
            await self.add_items(conversation, exchange.input + response["output"], exchange.owner)

    async def add_items(self, conversation: str, items: list[Json], owner: str) -> None:
        """Add items to a conversation."""
        for item in items:
            await self.items.put(f"{conversation}/{item['id']}", item, owner, parent=conversation)

    async def _conversation_items(self, conversation: str, owner: str) -> list[Json]:
        await self.conversations.get(conversation, owner)
        items: list[Json] = []
        page = Page(MAX_OBJECTS_AT_ONCE, is_descending=False)
        while True:
            found, has_more = await self.items.read_page(
                owner, page, conversation, prefix=f"{conversation}/"
            )
            items += found
            if not has_more:
                return items
            self._verify_size(items, "conversation")
            page = Page(MAX_OBJECTS_AT_ONCE, is_descending=False, after=found[-1]["id"])

    async def read_earlier(self, identifier: str, owner: str) -> list[Json]:
        """Return the items of a response and of all responses that it continues, the earliest first."""
        turns: list[list[Json]] = []
        next_id: str | None = identifier
        while next_id is not None:
            record = await self.responses.find(next_id, owner)
            if record is None:
                where = "" if next_id == identifier else f", which {echo(identifier)} continues,"
                raise bad_request(
                    "previous_response_id",
                    f"{echo(next_id)}{where} was not found",
                    code="previous_response_not_found",
                )
            response = record["response"]
            if response["status"] not in ENDED:
                raise bad_request(
                    "previous_response_id",
                    f"must be a finished response, got one that is {response['status']}",
                )
            turn = record["input"] + response["output"]
            turns.append(turn)
            if len(turns) > MAX_EARLIER:
                raise bad_request(
                    "previous_response_id",
                    f"must refer to a chain of at most {MAX_EARLIER} responses",
                )
            if len(turns) % 16 == 0:
                self._verify_size([item for each in turns for item in each], "previous_response_id")
            if conversation := response.get("conversation"):
                # The earlier items of this response are in the conversation.
                before = await self._items_before(conversation["id"], turn, owner)
                turns.append(before)
                break
            next_id = response.get("previous_response_id")
        return [item for turn in reversed(turns) for item in turn]

    async def _items_before(self, conversation: str, turn: list[Json], owner: str) -> list[Json]:
        items = await self._conversation_items(conversation, owner)
        first = turn[0]["id"] if turn else None
        at = next((i for i, item in enumerate(items) if item["id"] == first), len(items))
        return items[:at]

    def _verify_size(self, items: list[Json], param: str) -> None:
        num_bytes = sum(map(size_of, items))
        if num_bytes > self._max_bytes:
            raise bad_request(
                param,
                f"has items of {num_bytes} bytes, but at most {self._max_bytes} are allowed "
                "(--max-body-bytes)",
            )

    async def _resolve(
        self, item: Json, index: int, owner: str, kept: KeptResponses | None
    ) -> Json:
        """Return the item that a reference names; any other item unchanged."""
        if item["type"] != "item_reference":
            return item
        identifier = item["id"]
        found = None if kept is None else kept.find_item(identifier)
        if found is None:
            found = await self._find_item(identifier, owner)
        if found is None:
            error = not_found("Item with id", identifier)
            error.param = f"input[{index}].id"
            raise error
        return found

    async def _find_item(self, identifier: str, owner: str) -> Json | None:
        home = owner_of_item(identifier)
        if home is None:
            return None
        if home.startswith("conv_"):
            item: Json | None = await self.items.find(f"{home}/{identifier}", owner)
            return item
        record = await self.responses.find(home, owner)
        if record is None:
            return None
        items = record["input"] + record["response"]["output"]
        return next((item for item in items if item["id"] == identifier), None)


def size_of(value: Any) -> int:
    """Return the approximate size of a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 8 + sum(len(key) + size_of(item) for key, item in value.items())
    return 8 + sum(map(size_of, value)) if isinstance(value, list) else 8
