"""Continue the requests of frontends that have exited, in this server or an earlier one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from ....protocol.errors import POISON_REQUEST, counted
from ....protocol.messages import FinishReason
from ....protocol.store.requests import ClaimedRequest, StreamState
from ...client.engine_client import RequestGroup
from ...client.engine_client import Sequence as GeneratedSequence
from ...client.groups.recording import Recording
from ...http.errors import APIError, internal_error
from ...http.routing import Router
from ...observability.tracing.request_trace import current_trace
from ...store.client import StoreError
from ..generation import Origin, PreparedPrompt, submit
from ..schema import GenerationRequest
from ..serving import Serving
from .records import RequestRecord, decode_record, monotonic_deadline

logger = logging.getLogger(__name__)

CLAIMED_AT_ONCE: Final = 8
"""Number of requests that one call claims. Other frontends can claim the rest."""

MAX_STARTS: Final = 8
"""Maximum number of times that a request is continued without a new token in between.

A server that is killed while it starts counts too, although the request did not cause this. Requests that crash workers
are found after two crashes by other means.
"""

RETRY_S: Final = 0.5
"""Seconds before another attempt, if the engine had no room for a request or the store did not answer."""

StartGroup = Callable[[Any, list[PreparedPrompt]], Awaitable[RequestGroup]]
"""Submits a request that was prepared again."""


@runtime_checkable
class Continuable(Protocol):
    """An endpoint that can continue its recorded requests."""

    async def continue_request(self, record: RequestRecord, owner: str, start: StartGroup) -> None:
        """Generate the rest of a request.

        Raises:
            APIError: It can no longer be prepared, or the engine does not accept it.
            NothingToContinue: No client waits for the rest.
        """

    async def record_failure(self, request_id: str, owner: str, error: APIError) -> bool:
        """Record that a request could not be continued.

        Return False if the token log, and not this endpoint, has to report the error to the client.

        Raises:
            APIError: The store does not answer (503).
        """


class NothingToContinue(Exception):
    """Raised if no client waits for the rest of a request."""


class Recovery:
    """Claims recorded requests from the store, and continues each after its last recorded token.

    `router` has the endpoints that recorded requests.
    """

    def __init__(self, serving: Serving, router: Router) -> None:
        self._serving = serving
        self._router = router
        self._is_claiming = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start to claim requests: now, and whenever a frontend has exited."""
        self._serving.store.on_orphans = self._claim_soon
        if self._serving.store.state.num_orphans:
            self._claim_soon()

    def close(self) -> None:
        """Stop. The next server continues the unfinished requests."""
        self._serving.store.on_orphans = lambda: None
        for task in self._tasks:
            task.cancel()

    def _claim_soon(self) -> None:
        if not self._is_claiming and not self._serving.engine.draining:
            self._is_claiming = True
            self._spawn(self._claim_all())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _claim_all(self) -> None:
        try:
            while claimed := await self._claim():
                for request in claimed:
                    self._spawn(self._continue(request))
                logger.info(
                    "continuing %s of a frontend that has exited", counted(len(claimed), "request")
                )
        finally:
            self._is_claiming = False

    async def _claim(self) -> Sequence[ClaimedRequest]:
        """Return claimed requests, as soon as the store answers."""
        while True:
            try:
                return await self._serving.store.claim(CLAIMED_AT_ONCE)
            except StoreError as error:
                logger.warning("requests of an exited frontend are waiting: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _continue(self, claimed: ClaimedRequest) -> None:
        log = self._serving.store.log
        num_tokens = [len(stream.tokens) // 4 for stream in claimed.streams]
        error: str | None
        try:
            await self._generate(claimed)
            return
        except NothingToContinue:
            error = None
        except APIError as refusal:
            error = await self._record_failure(claimed, refusal)
        except Exception:
            logger.exception(
                "request %s could not be continued",
                claimed.request_id,
                extra={"request_id": claimed.request_id},
            )
            failure = internal_error("the server was restarted and could not continue this request")
            error = await self._record_failure(claimed, failure)
        log.end_claimed(claimed.request_id, claimed.owner, num_tokens, error)

    async def _record_failure(self, claimed: ClaimedRequest, error: APIError) -> str | None:
        """Record that a request could not be continued.

        Return the error for the token log; None if the endpoint stored it.

        The record may be unreadable, so the endpoint is determined from the request's ID.
        """
        with contextlib.suppress(APIError):
            for endpoint in dict.fromkeys(route.endpoint for route in self._router.routes):
                if isinstance(endpoint, Continuable) and await endpoint.record_failure(
                    claimed.request_id, claimed.owner, error
                ):
                    return None
        return error.message

    async def _generate(self, claimed: ClaimedRequest) -> None:
        if claimed.num_starts > MAX_STARTS:
            raise APIError(500, POISON_REQUEST)
        record = decode_record(claimed.record)
        endpoints = (found.route.endpoint for found in self._router.find(record.path))
        endpoint = next((each for each in endpoints if isinstance(each, Continuable)), None)
        if endpoint is None:
            raise APIError(
                410, "the server was restarted with another version; send the request again"
            )
        while True:
            try:
                start = partial(self._submit, claimed, record)
                await endpoint.continue_request(record, claimed.owner, start)
                return
            except APIError as error:
                # The engine currently has no free capacity.
                if error.status != 503 or self._serving.engine.dead_reason is not None:
                    raise
            if self._serving.engine.draining:
                return
            await asyncio.sleep(RETRY_S)

    async def _submit(
        self,
        claimed: ClaimedRequest,
        record: RequestRecord,
        request: GenerationRequest,
        prompts: list[PreparedPrompt],
    ) -> RequestGroup:
        if (tracer := self._serving.tracer) is not None:
            trace = tracer.resume(record.trace_headers, record.path, record.request_id)
            current_trace.set(trace)
        deadline = monotonic_deadline(record.deadline)
        return await submit(
            self._serving,
            request,
            prompts,
            record.request_id,
            Origin(record.tenant, record.cache_owner, deadline, None, record.trace_headers),
            seeds=record.seeds,
            begin_recording=partial(self._adopt, claimed, record.is_run),
        )

    def _adopt(self, claimed: ClaimedRequest, is_run: bool, group: RequestGroup) -> Recording:
        """Give the sequences their recorded tokens, and continue to record them."""
        recording = group.recording = self._serving.store.log.begin(
            group,
            claimed.request_id,
            claimed.owner,
            claimed.record,
            grace_s=0.0 if is_run else self._serving.config.store.resume_grace_s,
            is_claimed=True,
            is_deleted_later=is_run,
        )
        for sequence, state in zip(group.sequences, claimed.streams, strict=True):
            self._restore(sequence, state)
        return recording

    def _restore(self, sequence: GeneratedSequence, state: StreamState) -> None:
        engine, end = self._serving.engine, state.end
        sequence.token_ids = array("i", state.tokens)
        sequence.logprobs = list(state.logprobs)
        sequence.prompt_logprob_messages = list(state.prompt_logprobs)
        if state.tokens:
            sequence.request.output_token_ids = state.tokens
            sequence.first_token_time = sequence.last_token_time = time.monotonic()
        sequence.request.is_resubmitted = sequence.was_accepted = True
        if end is not None:
            reason = FinishReason(end.reason)
            engine.finish_sequence(sequence, reason, stop_reason=end.stop_reason, error=end.error)
            return
        done = state.finished
        if sequence.is_watched:
            found = sequence.find_end(None if done is None else done.reason)
            if found is not None:
                reason, stop_reason = found
                engine.finish_sequence(sequence, reason, stop_reason=stop_reason)
                return
        if done is not None:
            index = sequence.request_index
            engine.finish_as_reported(sequence, msgspec.structs.replace(done, request_index=index))
