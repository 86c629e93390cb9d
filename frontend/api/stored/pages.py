"""Parse the query of a list route, and write its pages."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import QueryParams

from ...http.errors import wrong
from ..logprobs import Json
from ..numbers import parse_number
from .records import Page, not_found


def parse_page(
    query: QueryParams, *, default: int = 20, most: int = 100, order: str = "desc"
) -> Page:
    """Return the page that a query requests. Raise APIError 400 if a parameter is invalid."""
    text = query.get("limit", str(default))
    limit = parse_number(text)
    if limit is None or not 1 <= limit <= most:
        raise wrong("limit", f"between 1 and {most}", text)
    order = query.get("order", order)
    if order not in ("asc", "desc"):
        raise wrong("order", '"asc" or "desc"', order)
    return Page(limit, order == "desc", query.get("after", ""))


def cut_page(items: Sequence[Json], page: Page, what: str) -> tuple[list[Json], bool]:
    """Return a page of a list that is completely in memory, and whether there are more items.

    Raises:
        APIError: The item after which the page begins does not exist (404).
    """
    ordered = list(reversed(items)) if page.is_descending else list(items)
    if page.after:
        at = next((i for i, item in enumerate(ordered) if item.get("id") == page.after), None)
        if at is None:
            raise not_found(what, page.after)
        ordered = ordered[at + 1 :]
    return ordered[: page.limit], len(ordered) > page.limit


def list_body(items: list[Json], has_more: bool) -> Json:
    """Return the body of a list."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0].get("id") if items else None,
        "last_id": items[-1].get("id") if items else None,
        "has_more": has_more,
    }
