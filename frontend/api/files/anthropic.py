"""Anthropic's Files API, on the same routes as OpenAI's. Its clients send the header `anthropic-version`."""

from __future__ import annotations

import mimetypes
from datetime import UTC, datetime
from typing import Final

from starlette.datastructures import QueryParams
from starlette.types import Scope

from ...http.errors import bad_request
from ..logprobs import Json
from ..stored.pages import parse_page
from ..stored.records import Page

PURPOSE: Final = "user_data"
"""The purpose of the files that Anthropic's clients store."""

MAX_PAGE: Final = 1000
MAX_IDS: Final = 100
_CURSOR: Final = "page_"
_VERSION: Final = b"anthropic-version"


def is_from_anthropic(scope: Scope) -> bool:
    """Return whether a client of Anthropic's API sent the request."""
    return any(name == _VERSION for name, _ in scope["headers"])


def describe(file: Json) -> Json:
    """Return the description of a stored file in Anthropic's format."""
    described: Json = {
        "id": file["id"],
        "type": "file",
        "filename": file["filename"],
        "mime_type": mimetypes.guess_type(file["filename"])[0] or "application/octet-stream",
        "size_bytes": file["bytes"],
        "created_at": _time(file["created_at"]),
        "downloadable": True,
    }
    if (expires_at := file.get("expires_at")) is not None:
        described["expires_at"] = _time(expires_at)
    return described


def read_page(query: QueryParams) -> tuple[Page, bool]:
    """Return the page that a query requests, and whether its files are in reverse order.

    Raises:
        APIError: A parameter is invalid (400).
    """
    page = parse_page(query, most=MAX_PAGE)
    before = query.get("before_id", "")
    after = query.get("after_id", "") or query.get("page", "").removeprefix(_CURSOR)
    return Page(page.limit, not before, before or after), bool(before)


def read_ids(query: QueryParams) -> list[str]:
    """Return the files that a query names, each once. Raise APIError 400 if there are too many."""
    ids = list(dict.fromkeys(query.getlist("ids") + query.getlist("ids[]")))
    if len(ids) > MAX_IDS:
        raise bad_request("ids", f"must have at most {MAX_IDS} entries, got {len(ids)}")
    return ids


def list_body(files: list[Json], has_more: bool) -> Json:
    """Return the body of a list, with the marks of its ends in both the older and the newer format."""
    ids = [file["id"] for file in files] or [None]
    ends: Json = {"first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
    ends["next_page"] = f"{_CURSOR}{ids[-1]}" if files and has_more else None
    return {"data": [describe(file) for file in files]} | ends


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
