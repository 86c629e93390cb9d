"""Objects of one kind in the store, encoded as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from starlette.requests import Request

from ...http.errors import APIError, echo, unavailable
from ...store.client import RETRY_S, StoreClient, StoreError, UnknownObject
from ..logprobs import Json

SYSTEM: Final = "#engine"
"""The owner of objects that clients cannot read. No tenant has this name."""

MAX_OBJECTS_AT_ONCE: Final = 1000
"""Maximum number of objects that are read from the store with one call."""

_decode: Final = msgspec.json.Decoder().decode


def not_found(what: str, identifier: str) -> APIError:
    """Return a 404 for an object that does not exist or has another owner."""
    return APIError(404, f"{what} {echo(identifier)} was not found", param="id", code="not_found")


def owner_of(request: Request) -> str:
    """Return the owner of the objects that a request may read."""
    owner: str = request.scope["state"]["owner"]
    return owner


def key_of(request: Request) -> tuple[str, str]:
    """Return the identifier in a request's path, and the owner."""
    return request.path_params["id"], owner_of(request)


class Records:
    """The objects of one kind. Each object belongs to an owner; for others it appears not to exist.

    Args:
        store: The client of the store.
        kind: The kind of the objects.
        what: The name of the kind in error messages.
    """

    def __init__(self, store: StoreClient, kind: str, what: str) -> None:
        self._store = store
        self._kind = kind
        self._what = what

    async def put(self, identifier: str, record: Any, owner: str, parent: str = "") -> None:
        """Store a record, or replace it. Bytes are stored as they are.

        Raises:
            APIError: The record is too large, or the store does not answer (503).
        """
        data = record if isinstance(record, bytes) else msgspec.json.encode(record)
        with _translate_errors():
            await self._store.put(self._kind, identifier, data, owner=owner, parent=parent)

    async def find(self, identifier: str, owner: str) -> Any:
        """Return a record, or None if it does not exist. Raise APIError 503 if the store does not answer."""
        data = await self.find_data(identifier, owner)
        return None if data is None else _decode(data)

    async def find_data(self, identifier: str, owner: str) -> bytes | None:
        """Return the bytes of a record, or None if it does not exist.

        Raises:
            APIError: The store does not answer (503).
        """
        with _translate_errors():
            found = await self._store.get(self._kind, identifier, owner=owner)
        return None if found is None else found.data

    async def get(self, identifier: str, owner: str) -> Any:
        """Return a record.

        Raises:
            APIError: It does not exist for this owner (404), or the store does not answer (503).
        """
        record = await self.find(identifier, owner)
        if record is None:
            raise not_found(self._what, identifier)
        return record

    async def delete(self, identifier: str, owner: str) -> bool:
        """Delete a record. Return whether it existed. Raise APIError 503 if the store does not answer."""
        with _translate_errors():
            return await self._store.delete(self._kind, identifier, owner=owner)

    async def delete_children(self, parent: str, owner: str) -> None:
        """Delete all records with this parent. Raise APIError 503 if the store does not answer."""
        with _translate_errors():
            await self._store.delete_children(self._kind, parent, owner=owner)

    async def read_page(
        self, owner: str, page: Page, parent: str | None = None, prefix: str = ""
    ) -> tuple[list[Json], bool]:
        """Return a page of records, and whether there are more.

        Args:
            owner: The owner of the records.
            page: The part of the list to return.
            parent: The parent of the records; None for any.
            prefix: The prefix of the records' identifiers, which the page's `after` omits.

        Raises:
            APIError: The record after which the page begins does not exist (404), or the store does not answer (503).
        """
        records, _, has_more = await self._read(owner, page, parent, prefix)
        return [_decode(record) for record in records], has_more

    async def read_parts(self, parent: str, owner: str, after: str = "") -> tuple[list[bytes], str]:
        """Return the bytes of the records with this parent in order, and the identifier of the last record.

        Raises:
            APIError: The store does not answer (503).
        """
        parts: list[bytes] = []
        while True:
            page = Page(MAX_OBJECTS_AT_ONCE, is_descending=False, after=after)
            found, last, has_more = await self._read(owner, page, parent)
            parts += found
            after = last or after
            if not has_more:
                return parts, after

    async def _read(
        self, owner: str, page: Page, parent: str | None, prefix: str = ""
    ) -> tuple[list[bytes], str, bool]:
        try:
            with _translate_errors():
                found = await self._store.list(
                    self._kind,
                    owner=owner,
                    parent=parent,
                    after=f"{prefix}{page.after}" if page.after else "",
                    limit=page.limit,
                    order="desc" if page.is_descending else "asc",
                )
        except UnknownObject:
            raise not_found(self._what, page.after) from None
        last = found.objects[-1].object_id if found.objects else ""
        return [each.data for each in found.objects], last, found.has_more


@contextmanager
def _translate_errors() -> Iterator[None]:
    """A context that turns the errors of the store into APIError 503."""
    try:
        yield
    except StoreError as error:
        raise unavailable(str(error), RETRY_S) from None


class Page(msgspec.Struct, frozen=True):
    """The part of a list to return: at most `limit` objects after the object `after`."""

    limit: int
    is_descending: bool
    after: str = ""
