"""Stored chat completions: the answers, the messages before them, and the fields by which lists are filtered."""

from __future__ import annotations

from typing import Final

import msgspec

from ...store.client import StoreClient
from ..stored.records import MAX_OBJECTS_AT_ONCE, Page, Records, not_found

_WHAT: Final = "The chat completion"


class ChatEntry(msgspec.Struct):
    """The fields of a stored chat completion that lists are filtered and sorted by."""

    id: str
    model: str
    metadata: dict[str, str]


class ChatFilter(msgspec.Struct, frozen=True):
    """The filter of a list: only chat completions of a model, and with this metadata."""

    model: str | None
    metadata: dict[str, str]

    def matches(self, entry: ChatEntry) -> bool:
        """Return whether a chat completion passes the filter."""
        return self.model in (None, entry.model) and self.metadata.items() <= entry.metadata.items()


class ChatRecords:
    """Reads and writes stored chat completions. Those of other owners appear not to exist."""

    def __init__(self, store: StoreClient) -> None:
        self._answers = Records(store, "chat", _WHAT)
        self._messages = Records(store, "chat.messages", _WHAT)
        self._entries = Records(store, "chat.entry", _WHAT)

    async def save(self, entry: ChatEntry, answer: bytes, messages: bytes, owner: str) -> None:
        """Store an answer and the messages that it answers, both as JSON.

        Raises:
            APIError: It is too large, or the store does not answer (503).
        """
        await self._messages.put(entry.id, messages, owner)
        await self._answers.put(entry.id, answer, owner)
        await self._entries.put(entry.id, entry, owner)

    async def get(self, identifier: str, owner: str) -> bytes:
        """Return an answer with its metadata, as JSON.

        Raises:
            APIError: It does not exist (404), or the store does not answer (503).
        """
        entry = await self.get_entry(identifier, owner)
        answer = await self._answers.find_data(identifier, owner)
        if answer is None:
            raise not_found(_WHAT, identifier)
        return _with_metadata(answer, entry)

    async def get_entry(self, identifier: str, owner: str) -> ChatEntry:
        """Return the entry of a chat completion.

        Raises:
            APIError: It does not exist (404), or the store does not answer (503).
        """
        return msgspec.convert(await self._entries.get(identifier, owner), ChatEntry)

    async def get_messages(self, identifier: str, owner: str) -> bytes:
        """Return the messages that a chat completion answers, as JSON.

        Raises:
            APIError: It does not exist (404), or the store does not answer (503).
        """
        await self.get_entry(identifier, owner)
        messages = await self._messages.find_data(identifier, owner)
        if messages is None:
            raise not_found(_WHAT, identifier)
        return messages

    async def update(self, entry: ChatEntry, owner: str) -> None:
        """Replace the entry of a chat completion. Raise APIError 503 if the store does not answer."""
        await self._entries.put(entry.id, entry, owner)

    async def delete(self, identifier: str, owner: str) -> None:
        """Delete a chat completion.

        Raises:
            APIError: It does not exist (404), or the store does not answer (503).
        """
        if not await self._entries.delete(identifier, owner):
            raise not_found(_WHAT, identifier)
        await self._answers.delete(identifier, owner)
        await self._messages.delete(identifier, owner)

    async def list_page(
        self, owner: str, page: Page, wanted: ChatFilter
    ) -> tuple[list[tuple[ChatEntry, bytes]], bool]:
        """Return a page of answers with their entries, and whether there are more.

        Raises:
            APIError: The answer after which the page begins does not exist (404), or the store does not answer (503).
        """
        found: list[tuple[ChatEntry, bytes]] = []
        scan = Page(MAX_OBJECTS_AT_ONCE, page.is_descending, page.after)
        has_more = True
        while has_more:
            records, has_more = await self._entries.read_page(owner, scan)
            for entry in msgspec.convert(records, list[ChatEntry]):
                if not wanted.matches(entry):
                    continue
                if len(found) == page.limit:
                    return found, True
                answer = await self._answers.find_data(entry.id, owner)
                # The store may have deleted the answer to make room.
                if answer is not None:
                    found.append((entry, _with_metadata(answer, entry)))
            if has_more:
                scan = Page(scan.limit, scan.is_descending, records[-1]["id"])
        return found, False


def _with_metadata(answer: bytes, entry: ChatEntry) -> bytes:
    return b'%b,"metadata":%b}' % (answer[:-1], msgspec.json.encode(entry.metadata))
