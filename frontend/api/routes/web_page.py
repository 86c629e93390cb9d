"""The web page of `GET /`: HTML, style, program and icon, built from `frontend/web/src`."""

from __future__ import annotations

import gzip
import hashlib
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...http.access import WEB_PATHS
from ...http.routing import Route

BUNDLE: Final = Path(__file__).parents[2] / "web" / "bundle"

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The page may load and call only its own server, and cannot turn text into HTML or scripts."""

GREETING: Final = "Engine is running. /docs describes its API.\n"
"""The answer to clients that are not browsers, such as Ollama's command line and Claude Code."""

_MEDIA_TYPES: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_BASE: Final = '<base href="/">'


class WebFile:
    """A file in memory, uncompressed and compressed.

    Args:
        content: The bytes of the file.
        media_type: Its type.
        vary: The request headers that the response depends on.
    """

    def __init__(self, content: bytes, media_type: str, vary: str = "Accept-Encoding") -> None:
        self._content = content
        self._media_type = media_type
        self._etag = hashlib.sha256(content).hexdigest()[:32]
        self._headers = {
            # Browsers revalidate the file each time, and get 304 until it changes. So after an upgrade, browsers show
            # the new page immediately.
            "Cache-Control": "no-cache",
            "Content-Security-Policy": CONTENT_SECURITY_POLICY,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Vary": vary,
            "X-Content-Type-Options": "nosniff",
        }

    @cached_property
    def _compressed(self) -> bytes:
        return gzip.compress(self._content, mtime=0)

    async def get(self, request: Request) -> Response:
        """Return the file; 304 without a body if the client has it."""
        is_compressed = "gzip" in request.headers.get("accept-encoding", "").lower()
        # The two encodings have different bytes, so their strong tags must differ.
        etag = f'"{self._etag}{"-gzip" if is_compressed else ""}"'
        headers = {**self._headers, "ETag": etag}
        known = request.headers.get("if-none-match", "")
        if etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        if not is_compressed:
            return Response(self._content, headers=headers, media_type=self._media_type)
        headers["Content-Encoding"] = "gzip"
        return Response(self._compressed, headers=headers, media_type=self._media_type)


def web_page_routes(root_path: str) -> list[Route]:
    """Return the routes of the page and of its files.

    Args:
        root_path: The path before `/`, if a proxy removes one.
    """
    base = f'<base href="{escape(root_path.rstrip("/"))}/">'
    page = (BUNDLE / "index.html").read_text("utf-8").replace(_BASE, base)
    index = WebFile(page.encode(), _MEDIA_TYPES[".html"], "Accept, Accept-Encoding")

    async def root(request: Request) -> Response:
        if prefers_html(request.headers.get("accept", "")):
            return await index.get(request)
        return PlainTextResponse(GREETING, headers={"Vary": "Accept"})

    routes = [Route("/", root)]
    for path in WEB_PATHS[1:]:
        file = BUNDLE / Path(path).name
        routes.append(Route(path, WebFile(file.read_bytes(), _MEDIA_TYPES[file.suffix]).get))
    return routes


def prefers_html(accept: str) -> bool:
    """Return whether an Accept header names text/html before any other type, as browsers' headers do.

    `*/*` does not count, because clients that are not browsers send it.
    """
    weights: dict[str, float] = {}
    for choice in accept.lower().split(","):
        media_type, *parameters = (part.strip() for part in choice.split(";"))
        weight = next((p.removeprefix("q=") for p in parameters if p.startswith("q=")), "1")
        try:
            weights[media_type] = float(weight)
        except ValueError:
            weights[media_type] = 0.0
    html = weights.get("text/html", 0.0)
    others = (weights.get(kind, 0.0) for kind in ("application/json", "text/plain"))
    return html > 0.0 and all(html >= other for other in others)
