"""Store and load batches, their results, and the list of unfinished batches."""

from __future__ import annotations

import time
import uuid
from typing import Final

import msgspec

from ...http.errors import APIError
from ...store.client import StoreClient
from ..logprobs import Json
from ..schema.files import BatchRequest
from ..stored.records import SYSTEM, Page, Records
from .lines import MESSAGES

WINDOW_S: Final = 24 * 3600
"""Seconds within which a batch must be finished (`completion_window`)."""

ENDED: Final = ("failed", "completed", "expired", "cancelled")


class BatchWork(msgspec.Struct):
    """The data of a batch for the frontend that executes it."""

    batch_id: str
    owner: str
    tenant: str
    cache_owner: str
    expires_s: int | None

    @property
    def identity(self) -> Json:
        """The fields of a request's state that identify the client."""
        return {
            "owner": self.owner,
            "tenant": self.tenant,
            "cache_owner": bytes.fromhex(self.cache_owner),
        }


class BatchRecords:
    """Reads and writes batches, their results, and the list of unfinished batches."""

    def __init__(self, store: StoreClient) -> None:
        self._batches = Records(store, "batch", "The batch")
        self._works = Records(store, "batch.work", "The batch")
        self._cancellations = Records(store, "batch.cancel", "The batch")
        self.results = Records(store, "batch.result", "The result")

    async def create(
        self, body: BatchRequest, state: Json, expires_s: int | None, num_requests: int = 0
    ) -> Json:
        """Store a new batch and return its description. `num_requests` is 0 as long as the file has not been read."""
        identifier, now = f"batch_{uuid.uuid4().hex}", int(time.time())
        batch = {
            "id": identifier,
            "object": "batch",
            "endpoint": body.endpoint,
            "errors": None,
            "input_file_id": body.input_file_id,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + WINDOW_S,
            "in_progress_at": None,
            "finalizing_at": None,
            "completed_at": None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": num_requests, "completed": 0, "failed": 0},
            "metadata": body.metadata,
        }
        await self.put(batch, state["owner"])
        work = BatchWork(
            identifier, state["owner"], state["tenant"], state["cache_owner"].hex(), expires_s
        )
        await self._works.put(identifier, work, SYSTEM)
        return batch

    async def put(self, batch: Json, owner: str) -> None:
        """Replace the description of a batch."""
        await self._batches.put(batch["id"], batch, owner, parent=_list_of(batch["endpoint"]))

    async def get(self, identifier: str, owner: str) -> Json:
        """Return the description of a batch. Raise APIError 404 if the batch does not exist."""
        batch: Json = await self._batches.get(identifier, owner)
        if batch["status"] in ENDED:
            return batch
        if cancellation := await self._cancellations.find(identifier, owner):
            return batch | {"status": "cancelling", "cancelling_at": cancellation["at"]}
        return batch

    async def list_page(
        self, owner: str, page: Page, endpoint: str = ""
    ) -> tuple[list[Json], bool]:
        """Return a page of OpenAI's batches, or of those for Anthropic's `endpoint`, and whether there are more."""
        return await self._batches.read_page(owner, page, _list_of(endpoint))

    async def delete(self, identifier: str, owner: str) -> None:
        """Delete the description of a batch that has ended."""
        await self._batches.delete(identifier, owner)

    async def cancel(self, identifier: str, owner: str) -> None:
        """Ask the frontend that executes a batch to cancel it."""
        await self._cancellations.put(identifier, {"at": int(time.time())}, owner)

    async def list_work(self) -> list[BatchWork]:
        """Return the unfinished batches, the oldest first."""
        parts, _ = await self._works.read_parts("", SYSTEM)
        return [msgspec.json.decode(part, type=BatchWork) for part in parts]

    async def finish(self, work: BatchWork, batch: Json | None) -> None:
        """Store the end of a batch, and delete the data that was needed to execute it."""
        if batch is not None:
            cancellation = await self._cancellations.find(work.batch_id, work.owner)
            if cancellation is not None and batch["status"] == "cancelled":
                batch = batch | {"cancelling_at": cancellation["at"]}
            await self.put(batch, work.owner)
        await self._works.delete(work.batch_id, SYSTEM)
        await self._cancellations.delete(work.batch_id, work.owner)
        await self.results.delete_children(work.batch_id, work.owner)

    async def find(self, work: BatchWork) -> Json | None:
        """Return the description of a batch; None if the store has deleted it to make room."""
        try:
            return await self.get(work.batch_id, work.owner)
        except APIError as error:
            if error.status != 404:
                raise
            return None


def _list_of(endpoint: str) -> str:
    """Return the parent of the batches for an endpoint, because each API lists its own batches."""
    return MESSAGES if endpoint == MESSAGES else ""


def result_key(batch_id: str, number: int) -> str:
    """Return the identifier of the stored result of a line."""
    return f"{batch_id}/{number:06}"
