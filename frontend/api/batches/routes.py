"""The routes below `/v1/batches`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ...http.errors import APIError, bad_request, echo, json_response, wrong
from ...http.routing import Route
from ..bodies.intake import Intake, RouteHandlers, reads
from ..files.storage import read_expiry
from ..schema.files import BatchRequest
from ..serving import Serving
from ..stored.metadata import verify_metadata
from ..stored.pages import list_body, parse_page
from ..stored.records import key_of, owner_of
from .executor import BatchExecutor
from .lines import ENDPOINTS, with_version
from .records import ENDED


class Batches(RouteHandlers):
    """Creates, reads and cancels batches."""

    def __init__(self, serving: Serving, intake: Intake, executor: BatchExecutor) -> None:
        super().__init__(serving, intake)
        self._executor = executor
        self._records, self._files = executor.records, executor.files

    @reads(BatchRequest)
    async def create(self, request: Request, body: BatchRequest, size: int) -> Response:
        """Create a batch."""
        state = request.scope["state"]
        endpoint = with_version(body.endpoint or "")
        if endpoint not in ENDPOINTS:
            raise wrong("endpoint", f"one of {', '.join(ENDPOINTS)}", body.endpoint)
        body.endpoint = endpoint
        if body.completion_window != "24h":
            raise wrong("completion_window", '"24h"', body.completion_window)
        verify_metadata(body.metadata)
        expires_s = read_expiry(body.output_expires_after, "output_expires_after")
        if body.input_file_id is None:
            raise bad_request("input_file_id", "is required")
        try:
            file = await self._files.get(body.input_file_id, state["owner"])
        except APIError as error:
            error.param = "input_file_id"
            raise
        if file["purpose"] != "batch":
            raise wrong("input_file_id", 'a file with the purpose "batch"', file["purpose"])
        batch = await self._records.create(body, state, expires_s)
        self._executor.wake()
        return json_response(batch)

    async def list(self, request: Request) -> Response:
        """List batches, the newest first."""
        page = parse_page(request.query_params)
        found = await self._records.list_page(owner_of(request), page)
        return json_response(list_body(*found))

    async def retrieve(self, request: Request) -> Response:
        """Describe a batch."""
        return json_response(await self._records.get(*key_of(request)))

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch."""
        identifier, owner = key_of(request)
        batch = await self._records.get(identifier, owner)
        if batch["status"] in ENDED:
            raise APIError(
                409, f"{echo(identifier)} cannot be cancelled, because it is {batch['status']}"
            )
        await self._records.cancel(identifier, owner)
        self._executor.cancel(identifier)
        return json_response(await self._records.get(identifier, owner))


def batch_routes(serving: Serving, intake: Intake, executor: BatchExecutor) -> list[Route]:
    """Return the routes of OpenAI's batches."""
    batches = Batches(serving, intake, executor)
    return [
        Route("/batches", batches.list),
        Route("/batches", batches.create),
        Route("/batches/{id}", batches.retrieve),
        Route("/batches/{id}/cancel", batches.cancel, methods=["POST"]),
    ]
