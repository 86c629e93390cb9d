"""Background responses, which run without their client and are stored."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from starlette.types import Message

from ...client.engine_client import BeginRecording, RequestGroup
from ...client.groups.recording import Recording
from ...http.errors import APIError, internal_error, too_many_requests, unavailable
from ...http.routing import Asgi
from ...store.client import StoreError
from ..bodies.body import ClientDisconnected
from ..durable.keeper import Keeper, encode_record
from ..durable.records import RequestRecord
from ..generation import Origin, PreparedPrompt
from ..logprobs import Json
from ..schema.responses import ResponsesRequest
from ..serving import Serving
from .answer import describe_failure
from .request import Exchange
from .states import ENDED, ResponseStates

logger = logging.getLogger(__name__)

FLUSH_S: Final = 0.1
"""Seconds between writes of events to the store."""

CANCEL_POLL_S: Final = 1.0
"""Seconds between checks whether a client has cancelled a run through another frontend."""

MAX_RUNS: Final = 1024
"""Maximum number of background responses in one frontend."""
RETRY_S: Final = 5.0
"""Seconds after which a client may retry if the frontend has `MAX_RUNS` runs."""

LOST: Final = "the server was restarted and could not continue this response"
"""The error of a response whose run was lost."""

EVENT_END: Final = b"\n\n"


_CALLER: Final = ("request_id", "tenant", "owner", "cache_owner")
"""The fields of a request's state that identify the client."""

PATH: Final = "/v1/responses"


class RunRecord(msgspec.Struct):
    """The data with which a run can be continued, in addition to the stored response."""

    response_id: str
    body: ResponsesRequest
    caller: dict[str, Any]


class BackgroundRun:
    """One response that runs without its client. It stands in for the client's connection.

    Attributes:
        exchange: The request.
        response: The current state of the response.
        caller: The entries of the ASGI scope's `state` that identify the client.
        events: All events so far.
        num_readable_events: The number of events that readers in this frontend may get. The last events can be read
            once the response is stored.
        num_stored_events: The number of events in the store.
        batch_end: The number of events at the end of the batch that is being stored; 0 for none.
        is_done: True if the response has ended and is stored.
    """

    has_chunks = True

    def __init__(self, exchange: Exchange, response: Json, caller: Mapping[str, Any]) -> None:
        self.exchange = exchange
        self.response = response
        self.caller = {name: caller[name] for name in _CALLER}
        self.group: RequestGroup | None = None
        self.events: list[bytes] = []
        self.is_done = False
        self.is_paused = False
        self.on_writable: Callable[[], None] | None = None
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_recorded = asyncio.Event()
        self.num_readable_events = 0
        self.num_stored_events = 0
        self.batch_end = 0
        self._cancelled = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def asgi(self) -> Asgi:
        """The request of a client that waits for the response, for which the run stands in."""
        state = {**self.caller, "connection": self}
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "state": state}
        return Asgi(scope, self.receive, self.send)

    @property
    def is_running(self) -> bool:
        """True if the engine has begun to compute the response."""
        if self.group is None:
            return self.accepted.done()
        return any(s.scheduled_time for s in self.group.sequences)

    @property
    def is_cancelled(self) -> bool:
        """True if the run was cancelled."""
        return self._cancelled.is_set()

    def begin_stream(self) -> None:
        """Do nothing, because there is no connection to prepare."""

    def write_chunk(self, data: bytes) -> None:
        """Record the events of a chunk, instead of sending it to a client."""
        self._add_events(data)
        self.show_events()

    async def receive(self) -> Message:
        """Wait until the run is cancelled, and return the message of a disconnected client."""
        await self._cancelled.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Record the events of a message. Those of the last message are shown by `show_events`."""
        if message["type"] == "http.response.body":
            self._add_events(message.get("body", b""))
            if message.get("more_body"):
                self.show_events()

    def _add_events(self, data: bytes) -> None:
        self.events += (part + EVENT_END for part in data.split(EVENT_END) if part)

    def show_events(self) -> None:
        """Let the readers in this frontend get all events, and wake them."""
        self.num_readable_events = len(self.events)
        self._changed.set()
        self._changed = asyncio.Event()

    def cancel(self) -> None:
        """Cancel the run."""
        self._cancelled.set()

    def accept(self, group: RequestGroup | None = None) -> None:
        """Record that the engine has accepted the request. Without a `group`, it has several turns."""
        self.group = group
        if not self.accepted.done():
            self.accepted.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Wait for more events or the end of the run, at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


Generate = Callable[[BackgroundRun], Awaitable[None]]
"""Function that generates the response of a run and writes its events to the run."""


class RunKeeper(Keeper):
    """Records a run in the token log, also without `--store`, so that another frontend can continue it."""

    def __init__(self, serving: Serving, run: BackgroundRun) -> None:
        super().__init__(serving, run.asgi.scope, is_on=False)
        self._run = run

    def make_record(
        self, prompts: list[PreparedPrompt], *, prefix: str, fingerprint: str, origin: Origin
    ) -> RequestRecord:
        """Return the record of a run, still without seeds."""
        record = super().make_record(prompts, prefix=prefix, fingerprint=fingerprint, origin=origin)
        exchange, caller = self._run.exchange, self._run.caller
        caller = caller | {"cache_owner": caller["cache_owner"].hex()}
        body = msgspec.json.encode(RunRecord(exchange.response_id, exchange.body, caller))
        return msgspec.structs.replace(record, path=PATH, body=body, is_run=True)

    def begin_recording(self, record: RequestRecord) -> BeginRecording:
        """Return the function that begins the recording."""

        def begin(group: RequestGroup) -> Recording:
            return self._serving.store.log.begin(
                group,
                self._run.exchange.response_id,
                self._run.exchange.owner,
                encode_record(record, group),
                is_deleted_later=True,
            )

        return begin


class BackgroundRuns:
    """The background responses of one frontend.

    A run is recorded in the token log until its response is stored. If the frontend crashes, another one claims the run
    and continues it. Every event has the text of one token, so a continued run has the same events.
    """

    def __init__(self, states: ResponseStates, serving: Serving) -> None:
        self._states = states
        self._serving = serving
        self._begin_time = time.time()
        self._runs: dict[str, BackgroundRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, response_id: str, owner: str) -> BackgroundRun | None:
        """Return a run in this frontend; None if this owner has no such run here."""
        run = self._runs.get(response_id)
        return run if run is not None and run.exchange.owner == owner else None

    async def start(self, run: BackgroundRun, generate: Generate) -> None:
        """Start a run. Return once the engine has accepted it and the response is stored.

        Raises:
            APIError: The request is invalid (400), or cannot be accepted now (429, 503).
        """
        if len(self._runs) >= MAX_RUNS:
            raise too_many_requests(
                f"{len(self._runs)} background responses are running, but at most {MAX_RUNS} are allowed; "
                "retry later",
                RETRY_S,
            )
        task = asyncio.create_task(self._run(run, generate))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await run.accepted
        try:
            await self._states.save(run.exchange, run.response)
        except APIError:
            run.cancel()
            raise
        finally:
            run.is_recorded.set()

    async def resume(self, run: BackgroundRun, generate: Generate) -> None:
        """Continue a run until its end. Raise APIError if the engine does not accept it."""
        run.is_recorded.set()
        await self._run(run, generate)
        await run.accepted

    async def read_run(self, record: RequestRecord) -> BackgroundRun | None:
        """Return the run of a record; None if its response has ended or was deleted.

        Raises:
            APIError: The store does not answer (503), or an earlier response was deleted (404).
        """
        run_record = msgspec.json.decode(record.body, type=RunRecord)
        identifier, body, caller = run_record.response_id, run_record.body, run_record.caller
        owner = caller["owner"]
        stored = await self._states.responses.find(identifier, owner)
        if stored is None or stored["response"]["status"] in ENDED:
            return None
        response = stored["response"]
        exchange = Exchange(body, identifier, response["created_at"], stored["input"], owner=owner)
        caller = caller | {"cache_owner": bytes.fromhex(caller["cache_owner"])}
        run = BackgroundRun(exchange, response, caller)
        exchange.context, _ = await self._states.read_items(body, identifier, owner)
        parts, _ = await self._states.events.read_parts(identifier, owner)
        run.num_stored_events = b"".join(parts).count(EVENT_END)
        return run

    async def fail(self, identifier: str, owner: str, error: APIError) -> None:
        """Store that an unfinished response has failed, because its run cannot be continued.

        Raises:
            APIError: The store does not answer (503).
        """
        stored = await self._states.responses.find(identifier, owner)
        if stored is not None and stored["response"]["status"] not in ENDED:
            stored["response"] |= {"status": "failed", "error": describe_failure(error)}
            await self._states.responses.put(identifier, stored, owner)

    async def fail_if_lost(self, identifier: str, owner: str, response: Json) -> None:
        """If a response is unfinished but no frontend generates it, store that it has failed.

        This happens if its run could not be recorded, or was recorded by a version that this one cannot read.

        Raises:
            APIError: The store does not answer (503).
        """
        if response["status"] in ENDED or response["created_at"] >= self._begin_time:
            # A run that was not recorded ends with its frontend.
            return
        if self.find(identifier, owner) is not None:
            return
        try:
            is_running = await self._serving.store.is_unfinished(identifier, owner)
        except StoreError as error:
            raise unavailable(str(error), RETRY_S) from None
        if not is_running:
            await self.fail(identifier, owner, APIError(500, LOST))

    @property
    def _is_stopping(self) -> bool:
        """True if runs end because the server stops. A successor will finish them."""
        return self._serving.engine.dead_reason is not None or self._serving.engine.draining

    async def _run(self, run: BackgroundRun, generate: Generate) -> None:
        self._runs[run.exchange.response_id] = run
        error: APIError | None = None
        keeper = asyncio.create_task(self._keep(run))
        try:
            await generate(run)
        except APIError as caught:
            error = caught
        except ClientDisconnected:
            # The run was cancelled.
            pass
        except Exception:
            logger.exception("the background response %s failed", run.exchange.response_id)
            error = internal_error("Internal server error")
        finally:
            keeper.cancel()
        if not run.accepted.done():
            del self._runs[run.exchange.response_id]
            run.accepted.set_exception(error or internal_error("the response did not start"))
            return
        await run.is_recorded.wait()
        if run.response["status"] in ENDED or run.is_cancelled or not self._is_stopping:
            await self._finish(run, error)
        run.is_done = True
        run.show_events()
        del self._runs[run.exchange.response_id]

    async def _finish(self, run: BackgroundRun, error: APIError | None) -> None:
        exchange = run.exchange
        try:
            if run.response["status"] not in ENDED:
                run.response = run.response | {
                    "status": "cancelled" if run.is_cancelled else "failed",
                    "error": None if error is None else describe_failure(error),
                }
            # Readers in other frontends stop at a response that has ended, so its events are stored first.
            await self._store_events(run)
            await self._states.save(exchange, run.response)
            if run.group is not None and run.group.recording is not None:
                run.group.recording.delete()
        except APIError as failure:
            logger.debug("cannot store %s: %s", exchange.response_id, failure.message)

    async def _keep(self, run: BackgroundRun) -> None:
        """Periodically store the state and the events of a run, and cancel the run if its client requested that."""
        await run.is_recorded.wait()
        identifier, owner = run.exchange.response_id, run.exchange.owner
        check_at = time.monotonic() + CANCEL_POLL_S
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                if run.response["status"] == "queued" and run.is_running:
                    run.response = run.response | {"status": "in_progress"}
                    await self._states.save(run.exchange, run.response)
                await self._store_events(run)
                if time.monotonic() > check_at:
                    check_at = time.monotonic() + CANCEL_POLL_S
                    if await self._states.cancellations.delete(identifier, owner):
                        run.cancel()
            except APIError as failure:
                logger.debug("cannot store %s: %s", identifier, failure.message)

    async def _store_events(self, run: BackgroundRun) -> None:
        """Store the events that are not in the store, if the client wants to read them.

        A batch that may already be stored is stored again unchanged, because nobody reads it twice.
        """
        if not run.exchange.body.stream:
            return
        identifier = run.exchange.response_id
        while (first := run.num_stored_events) < len(run.events):
            run.batch_end = run.batch_end or len(run.events)
            await self._states.events.put(
                f"{identifier}/{first:08}",
                b"".join(run.events[first : run.batch_end]),
                run.exchange.owner,
                parent=identifier,
            )
            run.num_stored_events, run.batch_end = run.batch_end, 0
