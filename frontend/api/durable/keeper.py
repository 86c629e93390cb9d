"""Record one request in the store, so that its client can return and another frontend can continue it."""

from __future__ import annotations

import secrets
import time

import msgspec
from starlette._utils import get_route_path
from starlette.types import Receive, Scope

from ...client.engine_client import BeginRecording, RequestGroup
from ...client.groups.recording import Recording
from ...http.errors import APIError
from ...store.logprobs import is_recordable
from ..generation import Origin, PreparedPrompt
from ..serving import Serving
from .event_positions import EventPosition, read_last_event_id
from .records import (
    RecordedBody,
    RequestRecord,
    read_conversation_key,
    read_idempotency_key,
    wall_deadline,
)
from .resumption import Resumption, find_resumption


class Keeper:
    """Records one request. Enter it as a context while the request is submitted.

    It does nothing without `--store` and `--resume-grace`, and for requests of the server itself. Beam searches and
    requests with very many log-probabilities are not recorded, because tokens alone do not determine their answers.
    `is_on` is false if requests like this one are not recorded.
    """

    def __init__(self, serving: Serving, scope: Scope, *, is_on: bool = True) -> None:
        self._serving = serving
        self._scope = scope
        self._owner: str = scope["state"]["owner"]
        is_internal = scope["state"].get("is_internal", False)
        self.is_on = is_on and serving.config.store.keeps_requests and not is_internal
        self._body: RecordedBody | None = None
        self._key = ""
        self._conversation = ""
        self._holds_key = False
        self._is_kept = False

    def read_position(self) -> EventPosition | None:
        """Return the position from which a returning client continues its stream; None for a new request.

        Raises:
            APIError: The header is invalid (400).
        """
        return read_last_event_id(self._scope) if self.is_on else None

    async def find_resumption(self, position: EventPosition) -> Resumption:
        """Return the request whose stream the client continues.

        Raises:
            APIError: This client has no such request on this route (404).
        """
        found = await find_resumption(self._serving, position.request_id, self._owner, position)
        if not _is_same_route(found.record.path, get_route_path(self._scope)):
            with found:
                raise APIError(
                    404,
                    f"Last-Event-ID belongs to a request to {found.record.path}; send it there",
                    code="request_not_found",
                )
        return found

    def watch_body(self, receive: Receive) -> Receive:
        """Return a `receive` function that also records the body."""
        if not self.is_on:
            return receive
        self._body = RecordedBody(receive)
        return self._body

    def make_record(
        self, prompts: list[PreparedPrompt], *, prefix: str, fingerprint: str, origin: Origin
    ) -> RequestRecord:
        """Return the record of a request, still without seeds.

        Raises:
            APIError: The idempotency key or the ID of the conversation is invalid (400).
        """
        state = self._scope["state"]
        params = prompts[0].params
        self._is_kept = self.is_on and is_recordable(params)
        body, path = b"", ""
        answer_id = f"{prefix}-{state['request_id']}"
        if self._is_kept and self._body is not None:
            body, path = self._body.take(), get_route_path(self._scope)
            self._key = read_idempotency_key(self._scope)
            if not self._key and path.endswith("/completions"):
                self._conversation = read_conversation_key(self._scope)
            if state["has_given_id"]:
                # Request IDs from the client are not used here, because clients and proxies repeat them.
                answer_id += f"-{secrets.token_hex(8)}"
        return RequestRecord(
            path,
            body,
            answer_id,
            state["request_id"],
            int(time.time()),
            origin.tenant,
            origin.cache_owner,
            wall_deadline(origin.deadline),
            [],
            fingerprint,
            origin.trace_headers,
        )

    async def find_same_request(self, record: RequestRecord) -> Resumption | None:
        """Return the earlier request with the client's idempotency key; None if there is none.

        Raises:
            APIError: The earlier request was a different one (422), or is not accepted yet (409).
            StoreError: The store does not answer (503).
        """
        if not self._key:
            return None
        reply = await self._serving.store.reserve_key(self._owner, self._key)
        if reply.is_busy:
            raise APIError(
                409,
                "A request with this Idempotency-Key is just being accepted; retry later",
                type="conflict_error",
                headers={"retry-after": "1"},
            )
        if not reply.request_id:
            self._holds_key = True
            return None
        found = await find_resumption(self._serving, reply.request_id, self._owner)
        if found.record.body == record.body and _is_same_route(found.record.path, record.path):
            return found
        with found:
            raise APIError(
                422,
                "This Idempotency-Key was used for another request; use a new key for each request",
                param="Idempotency-Key",
            )

    def begin_recording(self, record: RequestRecord) -> BeginRecording | None:
        """Return the function that begins to record the request; None if it is not recorded."""
        if not self._is_kept:
            return None
        config = self._serving.config.store

        def begin(group: RequestGroup) -> Recording:
            self._holds_key = False
            return self._serving.store.log.begin(
                group,
                record.answer_id,
                self._owner,
                encode_record(record, group),
                key=self._key or self._conversation,
                grace_s=config.resume_grace_s,
            )

        return begin

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        if self._holds_key:
            self._serving.store.release_key(self._owner, self._key)
            self._holds_key = False


def encode_record(record: RequestRecord, group: RequestGroup) -> bytes:
    """Return a record that includes the seeds of a group, as bytes."""
    seeds = [sequence.request.sampling_params.seed or 0 for sequence in group.sequences]
    return msgspec.msgpack.encode(msgspec.structs.replace(record, seeds=seeds))


def _is_same_route(path: str, other: str) -> bool:
    return path.removeprefix("/v1") == other.removeprefix("/v1")
