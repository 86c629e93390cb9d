"""Store and load files, in parts."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any, Final

from ...http.errors import bad_request, wrong
from ...store.client import StoreClient
from ..logprobs import Json
from ..stored.records import Page, Records, not_found

PART_BYTES: Final = 4 * 1024 * 1024
"""Maximum bytes of a stored part of a file. Writing a part delays other calls of the store by some milliseconds."""

DAY_S: Final = 86400
BATCH_DAYS: Final = 30
"""Days after which files of batches expire, unless the client sets another time."""

MIN_EXPIRY_S: Final = 3600
MAX_EXPIRY_S: Final = 30 * DAY_S


class FileStorage:
    """The files of all clients.

    Args:
        store: The client of the store.
        kind: The kind of the files in the store.
        what: The name of the kind in error messages.
        id_prefix: The beginning of the files' identifiers.
    """

    def __init__(
        self,
        store: StoreClient,
        kind: str = "file",
        what: str = "The file",
        *,
        id_prefix: str = "file-",
    ) -> None:
        self._files = Records(store, kind, what)
        self._parts = Records(store, f"{kind}.part", what)
        self._what = what
        self._id_prefix = id_prefix

    async def create(
        self,
        name: str,
        purpose: str,
        content: Iterable[bytes | memoryview] | AsyncIterable[bytes],
        owner: str,
        expires_s: int | None = None,
    ) -> Json:
        """Store a file and return its description.

        Args:
            name: The name of the file at the client.
            purpose: The purpose of the file in OpenAI's API, such as "batch".
            content: The content in pieces of any size.
            owner: The tenant that may read it.
            expires_s: Seconds until the file is deleted; None for the default.

        Raises:
            APIError: The store does not answer (503).
        """
        identifier, now = f"{self._id_prefix}{uuid.uuid4().hex}", int(time.time())
        if expires_s is None and purpose.startswith("batch"):
            expires_s = BATCH_DAYS * DAY_S
        num_bytes = num_parts = 0
        async for piece in _iterate(content):
            for start in range(0, len(piece), PART_BYTES):
                part = bytes(piece[start : start + PART_BYTES])
                await self._parts.put(f"{identifier}/{num_parts:06}", part, owner, identifier)
                num_parts += 1
                num_bytes += len(part)
        file = {
            "id": identifier,
            "object": "file",
            "bytes": num_bytes,
            "created_at": now,
            "expires_at": None if expires_s is None else now + expires_s,
            "filename": name,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        await self._files.put(identifier, file, owner, parent=purpose)
        return file

    async def get(self, identifier: str, owner: str) -> Json:
        """Return the description of a file. Raise APIError 404 if the file does not exist, or has expired."""
        file: Json = await self._files.get(identifier, owner)
        if has_expired(file):
            await self.delete(identifier, owner)
            raise not_found(self._what, identifier)
        return file

    async def list_page(
        self, owner: str, page: Page, purpose: str | None
    ) -> tuple[list[Json], bool]:
        """Return a page of files, and whether there are more.

        Raises:
            APIError: The file after which the page begins does not exist (404).
        """
        files, has_more = await self._files.read_page(owner, page, purpose)
        return [file for file in files if not has_expired(file)], has_more

    async def delete(self, identifier: str, owner: str) -> bool:
        """Delete a file. Return whether it existed."""
        existed = await self._files.delete(identifier, owner)
        await self._parts.delete_children(identifier, owner)
        return existed

    async def read_parts(self, file: Json, owner: str) -> AsyncIterator[bytes]:
        """Yield the content of a file in parts. Raise APIError 404 if the store has deleted a part to make room."""
        num_bytes = number = 0
        while num_bytes < file["bytes"]:
            part = await self._parts.find_data(f"{file['id']}/{number:06}", owner)
            if part is None:
                raise not_found("The content of the file", file["id"])
            num_bytes += len(part)
            number += 1
            yield part

    async def read(self, identifier: str, owner: str) -> bytes:
        """Return the whole content of a file. Raise APIError 404 if the file does not exist."""
        file = await self.get(identifier, owner)
        return b"".join([part async for part in self.read_parts(file, owner)])


async def _iterate(
    content: Iterable[bytes | memoryview] | AsyncIterable[bytes],
) -> AsyncIterator[bytes | memoryview]:
    if isinstance(content, AsyncIterable):
        async for piece in content:
            yield piece
    else:
        for each in content:
            yield each


def has_expired(file: Json) -> bool:
    """Return whether a file has passed its expiry time, although it may still be in the store."""
    return file["expires_at"] is not None and time.time() > file["expires_at"]


def read_expiry(policy: dict[str, Any] | None, param: str) -> int | None:
    """Return the seconds after which a file expires by a policy of a JSON body; None for the default.

    Raises:
        APIError: The policy is invalid (400).
    """
    if policy is None:
        return None
    seconds = policy.get("seconds")
    if not isinstance(seconds, int):
        raise wrong(f"{param}.seconds", "an integer", seconds)
    return verify_expiry(policy.get("anchor"), seconds, param)


def verify_expiry(anchor: str | None, seconds: int | None, param: str) -> int | None:
    """Return the seconds after which a file expires; None for the default.

    Raises:
        APIError: The policy is invalid (400).
    """
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise bad_request(f"{param}.anchor", 'must be "created_at"')
    if seconds is None or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise wrong(f"{param}.seconds", f"between {MIN_EXPIRY_S} and {MAX_EXPIRY_S}", seconds)
    return seconds
