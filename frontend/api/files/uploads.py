"""OpenAI's Uploads API: files that clients send in parts. The routes are below `/v1/uploads`."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...http.errors import APIError, bad_request, json_response, wrong
from ...http.routing import Asgi, Route
from ...store.client import StoreClient
from ..bodies.form import FormDecoder
from ..bodies.intake import Intake, RouteHandlers, reads
from ..logprobs import Json
from ..schema.files import UploadCompletionRequest, UploadPartForm, UploadRequest
from ..serving import Serving
from ..stored.records import Page, Records, key_of
from .routes import MAX_NAME, PURPOSES
from .storage import FileStorage, has_expired, read_expiry

LIFETIME_S: Final = 3600
"""Seconds in which an upload must be completed."""

MAX_BYTES: Final = 8 * 1024**3
MAX_PARTS: Final = 1000

DATA: Final = "data"
"""The field of a form that has the content of a part."""


class UploadStorage:
    """The uploads of all clients, and the parts of those that are not complete."""

    def __init__(self, store: StoreClient) -> None:
        self._uploads = Records(store, "upload", "The upload")
        self.parts = FileStorage(store, "upload.part", "The part", id_prefix="part_")

    async def put(self, upload: Json, owner: str) -> None:
        """Store an upload, or replace it. Raise APIError 503 if the store does not answer."""
        await self._uploads.put(upload["id"], upload, owner)

    async def get_pending(self, identifier: str, owner: str) -> Json:
        """Return an upload that may have more parts.

        Raises:
            APIError: The upload does not exist (404), or it has ended (400).
        """
        upload: Json = await self._uploads.get(identifier, owner)
        status = "expired" if has_expired(upload) else upload["status"]
        if status != "pending":
            raise bad_request("id", f"names an upload that is {status}; create another one")
        return upload

    async def end(self, upload: Json, owner: str, status: str) -> Json:
        """Delete the parts of an upload, and return it with its new status."""
        upload |= {"status": status}
        await self.put(upload, owner)
        page = Page(MAX_PARTS, is_descending=False)
        for part in (await self.parts.list_page(owner, page, upload["id"]))[0]:
            await self.parts.delete(part["id"], owner)
        return upload


class AddPart(RouteHandlers):
    """The route that adds a part to an upload."""

    body_type = "multipart/form-data"
    body_schema = UploadPartForm
    file_field = DATA

    def __init__(self, serving: Serving, intake: Intake, uploads: UploadStorage) -> None:
        super().__init__(serving, intake)
        self._uploads = uploads
        self._decoder = FormDecoder(UploadPartForm, serving.config.frontend.strict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store a part."""
        owner = scope["state"]["owner"]
        with self._intake.lease() as lease:
            _, files = await self._intake.receive_form(
                Asgi(scope, receive, send), self._decoder, lease
            )
            if DATA not in files:
                raise bad_request(DATA, "is required: send it in the form")
            upload = await self._uploads.get_pending(scope["path_params"]["id"], owner)
            page = Page(MAX_PARTS, is_descending=False)
            parts, _ = await self._uploads.parts.list_page(owner, page, upload["id"])
            if len(parts) == MAX_PARTS:
                raise bad_request("id", f"names an upload with {MAX_PARTS} parts, the maximum")
            content = files[DATA].content
            part = await self._uploads.parts.create(
                "part", upload["id"], [content], owner, LIFETIME_S
            )
        described = {
            "id": part["id"],
            "object": "upload.part",
            "created_at": part["created_at"],
            "upload_id": upload["id"],
        }
        await json_response(described)(scope, receive, send)


class Uploads(RouteHandlers):
    """Creates, completes and cancels uploads."""

    def __init__(
        self, serving: Serving, intake: Intake, files: FileStorage, uploads: UploadStorage
    ) -> None:
        super().__init__(serving, intake)
        self._files = files
        self._uploads = uploads

    @reads(UploadRequest)
    async def create(self, request: Request, body: UploadRequest, size: int) -> Response:
        """Create an upload without parts."""
        if not body.filename:
            raise bad_request("filename", "is required")
        if body.purpose not in PURPOSES:
            raise wrong("purpose", f"one of {', '.join(PURPOSES)}", body.purpose)
        if body.bytes is None or not 1 <= body.bytes <= MAX_BYTES:
            raise wrong("bytes", f"between 1 and {MAX_BYTES}", body.bytes)
        now = int(time.time())
        upload = {
            "id": f"upload_{uuid.uuid4().hex}",
            "object": "upload",
            "bytes": body.bytes,
            "created_at": now,
            "expires_at": now + LIFETIME_S,
            "filename": body.filename[:MAX_NAME],
            "purpose": body.purpose,
            "status": "pending",
            "file": None,
            "file_expires_s": read_expiry(body.expires_after, "expires_after"),
        }
        await self._uploads.put(upload, request.scope["state"]["owner"])
        return json_response(_describe(upload))

    @reads(UploadCompletionRequest)
    async def complete(
        self, request: Request, body: UploadCompletionRequest, size: int
    ) -> Response:
        """Make a file of the parts in the given order."""
        identifier, owner = key_of(request)
        upload = await self._uploads.get_pending(identifier, owner)
        ids = body.part_ids or []
        if not 1 <= len(ids) <= MAX_PARTS:
            raise bad_request("part_ids", f"must have 1 to {MAX_PARTS} entries, got {len(ids)}")
        parts = [await self._find_part(part_id, upload, owner) for part_id in ids]
        num_bytes = sum(part["bytes"] for part in parts)
        if num_bytes != upload["bytes"]:
            raise bad_request(
                "part_ids", f"have {num_bytes} bytes, but the upload has {upload['bytes']}"
            )
        digest = hashlib.md5(usedforsecurity=False)

        async def content() -> AsyncIterator[bytes]:
            for part in parts:
                async for piece in self._uploads.parts.read_parts(part, owner):
                    await self._serving.executor.in_thread(digest.update, piece)
                    yield piece

        file = await self._files.create(
            upload["filename"], upload["purpose"], content(), owner, upload["file_expires_s"]
        )
        if body.md5 is not None and body.md5.lower() != digest.hexdigest():
            await self._files.delete(file["id"], owner)
            raise wrong("md5", f'"{digest.hexdigest()}", that of the parts', body.md5)
        upload["file"] = file
        return json_response(_describe(await self._uploads.end(upload, owner, "completed")))

    async def cancel(self, request: Request) -> Response:
        """Cancel an upload, and delete its parts."""
        identifier, owner = key_of(request)
        upload = await self._uploads.get_pending(identifier, owner)
        return json_response(_describe(await self._uploads.end(upload, owner, "cancelled")))

    async def _find_part(self, part_id: str, upload: Json, owner: str) -> Json:
        try:
            part = await self._uploads.parts.get(part_id, owner)
        except APIError as error:
            error.param = "part_ids"
            raise
        if part["purpose"] != upload["id"]:
            raise wrong("part_ids", "parts of this upload", part_id)
        return part


def upload_routes(
    serving: Serving, intake: Intake, files: FileStorage, uploads: UploadStorage
) -> list[Route]:
    """Return the routes."""
    routes = Uploads(serving, intake, files, uploads)
    return [
        Route("/uploads", routes.create),
        Route("/uploads/{id}/parts", AddPart(serving, intake, uploads)),
        Route("/uploads/{id}/complete", routes.complete),
        Route("/uploads/{id}/cancel", routes.cancel, methods=["POST"]),
    ]


def _describe(upload: Json) -> Json:
    return {name: value for name, value in upload.items() if name != "file_expires_s"}
