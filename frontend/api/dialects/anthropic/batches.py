"""`/v1/messages/batches`: Anthropic's Message Batches, executed as OpenAI's batches are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....http.errors import APIError, bad_request, echo, expect, expect_text, json_response
from ....http.routing import Route
from ...batches.executor import BatchExecutor
from ...batches.lines import MESSAGES, find_errors, parse_line, split_lines
from ...batches.records import ENDED
from ...bodies.intake import Intake, RouteHandlers, reads
from ...logprobs import Json
from ...schema.anthropic import MessageBatchRequest
from ...schema.files import BatchRequest
from ...serving import Serving
from ...stored.pages import parse_page
from ...stored.records import Page, key_of, owner_of
from .messages import error_body

MAX_PAGE: Final = 1000
_PREFIX: Final = "msg"
"""The beginning of the identifiers that clients see; the rest is the identifier of the stored batch."""


class MessageBatches(RouteHandlers):
    """Creates, reads, cancels and deletes batches of messages.

    A batch is stored as one of OpenAI's whose file has the requests, with the endpoint `/v1/messages`.
    """

    def __init__(self, serving: Serving, intake: Intake, executor: BatchExecutor) -> None:
        super().__init__(serving, intake)
        self._executor = executor
        self._records, self._files = executor.records, executor.files

    @reads(MessageBatchRequest)
    async def create(self, request: Request, body: MessageBatchRequest, size: int) -> Response:
        """Create a batch."""
        state = request.scope["state"]
        lines = await self._serving.executor.run(size, lambda: _encode_requests(body.requests))
        content = [line + b"\n" for line in lines]
        file = await self._files.create("requests.jsonl", "batch", content, state["owner"])
        made = BatchRequest(input_file_id=file["id"], endpoint=MESSAGES, completion_window="24h")
        batch = await self._records.create(made, state, None, len(lines))
        self._executor.wake()
        return json_response(_describe(batch, request))

    async def list(self, request: Request) -> Response:
        """List batches, the newest first."""
        query = request.query_params
        page = parse_page(query, most=MAX_PAGE)
        before, after = query.get("before_id", ""), query.get("after_id", "")
        page = Page(page.limit, not before, (before or after).removeprefix(_PREFIX))
        found, has_more = await self._records.list_page(owner_of(request), page, MESSAGES)
        batches = [_describe(batch, request) for batch in (found[::-1] if before else found)]
        ids = [batch["id"] for batch in batches] or [None]
        ends = {"first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
        return json_response({"data": batches} | ends)

    async def retrieve(self, request: Request) -> Response:
        """Describe a batch."""
        return json_response(_describe(await self._get(request), request))

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch. One that has ended stays as it is."""
        batch = await self._get(request)
        if batch["status"] not in ENDED:
            await self._records.cancel(batch["id"], owner_of(request))
            self._executor.cancel(batch["id"])
            batch = await self._get(request)
        return json_response(_describe(batch, request))

    async def delete(self, request: Request) -> Response:
        """Delete a batch that has ended, with its results."""
        batch, owner = await self._get_ended(request, "deleted"), owner_of(request)
        for kind in ("input", "output", "error"):
            if identifier := batch[f"{kind}_file_id"]:
                await self._files.delete(identifier, owner)
        await self._records.delete(batch["id"], owner)
        return json_response({"id": _PREFIX + batch["id"], "type": "message_batch_deleted"})

    async def results(self, request: Request) -> Response:
        """Return the results of a batch that has ended, one a line, in the order of the requests."""
        batch, owner = await self._get_ended(request, "read"), owner_of(request)
        files = {
            kind: await self._files.read(identifier, owner)
            for kind in ("input", "output", "error")
            if (identifier := batch[f"{kind}_file_id"])
        }
        size = sum(map(len, files.values()))
        lines = await self._serving.executor.run(
            size, lambda: b"".join(_results(files, is_expired=batch["status"] == "expired"))
        )
        return Response(lines, media_type="application/x-jsonl")

    async def _get(self, request: Request) -> Json:
        identifier, owner = key_of(request)
        batch = await self._records.get(identifier.removeprefix(_PREFIX), owner)
        if batch["endpoint"] != MESSAGES:
            raise APIError(
                404,
                f"The batch {echo(identifier)} was created with POST /v1/batches; use that route",
                param="id",
            )
        return batch

    async def _get_ended(self, request: Request, what: str) -> Json:
        batch = await self._get(request)
        if batch["status"] not in ENDED:
            raise APIError(400, f"{echo(_PREFIX + batch['id'])} cannot be {what} before it ends")
        return batch


def message_batch_routes(serving: Serving, intake: Intake, executor: BatchExecutor) -> list[Route]:
    """Return the routes."""
    batches = MessageBatches(serving, intake, executor)
    path = f"{MESSAGES}/batches"
    return [
        Route(path, batches.list),
        Route(path, batches.create),
        Route(path + "/{id}", batches.retrieve),
        Route(path + "/{id}", batches.delete, methods=["DELETE"]),
        Route(path + "/{id}/cancel", batches.cancel, methods=["POST"]),
        Route(path + "/{id}/results", batches.results),
    ]


def _encode_requests(requests: list[Json] | None) -> list[bytes]:
    """Return the lines of the input file."""
    if not requests:
        raise bad_request("requests", "is required and must not be empty")
    lines = []
    for i, each in enumerate(requests):
        where = f"requests[{i}]"
        params = expect(each.get("params"), dict, f"{where}.params", "an object")
        identifier = expect_text(each, "custom_id", where)
        line = {"custom_id": identifier, "url": MESSAGES, "body": params}
        lines.append(msgspec.json.encode(line))
    _, errors = find_errors(lines, MESSAGES)
    if errors:
        error = errors[0]
        param = (error["param"] or "").replace("body.", "params.")
        number = error["line"] - 1
        place = f"requests[{number}].{param}" if param else "requests"
        raise APIError(400, f"{place}: {error['message']}", param=place)
    return lines


def _describe(batch: Json, request: Request) -> Json:
    """Return a batch as Anthropic's API describes it."""
    status, counts = batch["status"], batch["request_counts"]
    has_ended = status in ENDED
    num_left = counts["total"] - counts["completed"] - counts["failed"]
    shown = _PREFIX + batch["id"]
    ended_at = next((batch[f"{name}_at"] for name in ENDED if batch[f"{name}_at"]), None)
    return {
        "id": shown,
        "type": "message_batch",
        "processing_status": "ended"
        if has_ended
        else "canceling"
        if status == "cancelling"
        else "in_progress",
        "request_counts": {
            "processing": 0 if has_ended else counts["total"],
            "succeeded": counts["completed"] if has_ended else 0,
            "errored": counts["failed"] if has_ended else 0,
            "canceled": num_left if status == "cancelled" else 0,
            "expired": num_left if status == "expired" else 0,
        },
        "created_at": _time(batch["created_at"]),
        "expires_at": _time(batch["expires_at"]),
        "ended_at": _time(ended_at),
        "cancel_initiated_at": _time(batch["cancelling_at"]),
        "archived_at": None,
        "results_url": f"{request.base_url}{MESSAGES[1:]}/batches/{shown}/results"
        if has_ended
        else None,
    }


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _results(files: dict[str, bytes], *, is_expired: bool) -> Iterator[bytes]:
    answers: dict[str, Json] = {}
    for kind in ("output", "error"):
        for line in split_lines(files.get(kind, b"")):
            answer = msgspec.json.decode(line)
            answers[answer["custom_id"]] = _result(answer)
    missing = {"type": "expired" if is_expired else "canceled"}
    for line in split_lines(files["input"]):
        identifier = parse_line(line, MESSAGES).custom_id
        result = {"custom_id": identifier, "result": answers.get(identifier, missing)}
        yield msgspec.json.encode(result) + b"\n"


def _result(answer: Json) -> Json:
    """Return the result for a line of OpenAI's output or error file."""
    response: Any = answer["response"]
    if response is None:
        if answer["error"]["code"] == "batch_expired":
            return {"type": "expired"}
        error, identifier = APIError(500, answer["error"]["message"]), ""
    elif response["status_code"] < 400:
        return {"type": "succeeded", "message": response["body"]}
    else:
        fields, identifier = response["body"]["error"], response["request_id"]
        error = APIError(response["status_code"], fields["message"], code=fields["code"])
    return {"type": "errored", "error": error_body(error, identifier)}
