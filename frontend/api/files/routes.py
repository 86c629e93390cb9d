"""The routes below `/v1/files`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...http.errors import APIError, bad_request, json_response, renamer, renaming, wrong
from ...http.routing import Asgi, Route
from ..bodies.form import FormDecoder
from ..bodies.intake import Intake, RouteHandlers
from ..schema.files import FileRequest
from ..serving import Serving
from ..stored.pages import list_body, parse_page
from ..stored.records import key_of, not_found, owner_of
from . import anthropic
from .storage import FileStorage, verify_expiry

PURPOSES: Final = ("batch", "user_data", "vision", "assistants", "evals", "fine-tune")

MAX_NAME: Final = 255
"""Maximum characters of a file's name; the rest is cut."""

MAX_PAGE: Final = 1000


class Upload(RouteHandlers):
    """The route `/v1/files`: POST stores a file from a form, and GET lists files."""

    body_type = "multipart/form-data"
    body_schema = FileRequest

    def __init__(self, serving: Serving, intake: Intake, files: FileStorage) -> None:
        super().__init__(serving, intake)
        self._files = files
        self._decoder = FormDecoder(FileRequest, serving.config.frontend.strict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store a file."""
        with self._intake.lease() as lease:
            request, files = await self._intake.receive_form(
                Asgi(scope, receive, send), self._decoder, lease
            )
            is_anthropic = anthropic.is_from_anthropic(scope)
            purpose = request.purpose
            if purpose is None and is_anthropic:
                purpose = anthropic.PURPOSE
            if purpose not in PURPOSES:
                raise wrong("purpose", f"one of {', '.join(PURPOSES)}", request.purpose)
            if "file" not in files:
                raise bad_request("file", "is required: send it in the form")
            anchor, seconds = request.expires_anchor, request.expires_seconds
            names = {}
            if request.expires_in_seconds is not None:
                anchor, seconds = "created_at", request.expires_in_seconds
                names = {"expires_after.seconds": "expires_in_seconds"}
            with renaming(renamer(names)):
                seconds = verify_expiry(anchor, seconds, "expires_after")
            file = await self._files.create(
                files["file"].filename[:MAX_NAME] or "upload",
                purpose,
                [files["file"].content],
                scope["state"]["owner"],
                seconds,
            )
        shown = anthropic.describe(file) if is_anthropic else file
        await json_response(shown)(scope, receive, send)


class Files:
    """Lists, reads and deletes files."""

    def __init__(self, files: FileStorage) -> None:
        self._files = files

    async def list(self, request: Request) -> Response:
        """List files."""
        if anthropic.is_from_anthropic(request.scope):
            return await self._list_for_anthropic(request)
        page = parse_page(request.query_params, default=MAX_PAGE, most=10_000)
        purpose = request.query_params.get("purpose")
        found = await self._files.list_page(owner_of(request), page, purpose)
        return json_response(list_body(*found))

    async def _list_for_anthropic(self, request: Request) -> Response:
        owner = owner_of(request)
        if ids := anthropic.read_ids(request.query_params):
            files = []
            for identifier in ids:
                try:
                    files.append(await self._files.get(identifier, owner))
                except APIError as error:
                    if error.status != 404:
                        raise
            return json_response(anthropic.list_body(files, has_more=False))
        page, is_reversed = anthropic.read_page(request.query_params)
        files, has_more = await self._files.list_page(owner, page, None)
        return json_response(anthropic.list_body(files[::-1] if is_reversed else files, has_more))

    async def retrieve(self, request: Request) -> Response:
        """Describe a file."""
        file = await self._files.get(*key_of(request))
        is_anthropic = anthropic.is_from_anthropic(request.scope)
        return json_response(anthropic.describe(file) if is_anthropic else file)

    async def delete(self, request: Request) -> Response:
        """Delete a file."""
        identifier, owner = key_of(request)
        if not await self._files.delete(identifier, owner):
            raise not_found("The file", identifier)
        if anthropic.is_from_anthropic(request.scope):
            return json_response({"id": identifier, "type": "file_deleted"})
        return json_response({"id": identifier, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """Return the content of a file."""
        identifier, owner = key_of(request)
        file = await self._files.get(identifier, owner)
        parts = self._files.read_parts(file, owner)
        # If the first part is missing, report that before the response starts.
        first = await anext(parts, b"")

        async def all_parts() -> AsyncIterator[bytes]:
            yield first
            async for part in parts:
                yield part

        headers = {"content-length": str(file["bytes"])}
        return StreamingResponse(all_parts(), 200, headers, "application/octet-stream")


def file_routes(serving: Serving, intake: Intake, files: FileStorage) -> list[Route]:
    """Return the routes."""
    routes = Files(files)
    return [
        Route("/files", routes.list),
        Route("/files", Upload(serving, intake, files)),
        Route("/files/{id}", routes.retrieve),
        Route("/files/{id}", routes.delete, methods=["DELETE"]),
        Route("/files/{id}/content", routes.content),
    ]
