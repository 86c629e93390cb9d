"""Responses that run without their client, in the frontend that accepted them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

import msgspec
from starlette.types import Message, Scope

from ...client.engine_client import RequestGroup
from ...http.errors import APIError, internal_error, too_many_requests
from ..bodies.body import ClientDisconnected
from ..logprobs import Json
from ..schema.responses import ResponsesRequest
from ..serving import Serving
from ..stored.records import SYSTEM
from .answer import describe_failure
from .request import Exchange
from .states import ENDED, ResponseStates

logger = logging.getLogger(__name__)

FLUSH_S: Final = 0.1
"""Seconds between writes of events to the store."""

CANCEL_POLL_S: Final = 1.0
"""Seconds between checks whether another frontend was asked to cancel a run."""

MAX_RUNS: Final = 1024
"""Maximum number of background responses in one frontend."""
RETRY_S: Final = 5.0
"""Seconds after which a client may retry if there are as many."""

EVENT_END: Final = b"\n\n"


_CALLER: Final = ("request_id", "tenant", "owner", "cache_owner")
"""The part of the state of a request that says who sent it."""

MAX_ATTEMPTS: Final = 3
"""Maximum number of times that a run is started, because it may be what ends its frontend."""

MAX_FRONTENDS: Final = 64
"""Frontends of an earlier server whose runs are looked for."""


class RunRecord(msgspec.Struct):
    """The data with which a run can be started again."""

    response_id: str
    body: ResponsesRequest
    caller: dict[str, Any]
    num_attempts: int


class BackgroundRun:
    """One response that runs without its client. It takes the place of a client's connection.

    Attributes:
        exchange: The request.
        response: The response as it is at present.
        caller: The part of the state of the client's request that says who it is.
        events: All events so far.
        num_stored_events: How many of them are in the store.
        num_attempts: How often the run was started.
        is_done: Whether the response has ended and is stored.
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
        self.num_stored_events = 0
        self.num_attempts = 1
        self._cancelled = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def scope(self) -> Scope:
        """The request as it comes from a client that waits."""
        return {
            "type": "http",
            "method": "POST",
            "path": "/v1/responses",
            "headers": [],
            "state": {**self.caller, "connection": self},
        }

    @property
    def is_running(self) -> bool:
        """True if the engine has begun to compute the response."""
        return self.group is not None and any(s.scheduled_time for s in self.group.sequences)

    @property
    def is_cancelled(self) -> bool:
        """True if the run was cancelled."""
        return self._cancelled.is_set()

    def begin_stream(self) -> None:
        """Do nothing: there is no head to write."""

    def write_chunk(self, data: bytes) -> None:
        """Record events."""
        self.events += (part + EVENT_END for part in data.split(EVENT_END) if part)
        self.notify()

    async def receive(self) -> Message:
        """Wait until the run is cancelled, and return what a client's connection returns then."""
        await self._cancelled.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Record the events of a message."""
        if message["type"] == "http.response.body":
            self.write_chunk(message.get("body", b""))

    def cancel(self) -> None:
        """End the run."""
        self._cancelled.set()

    def accept(self, group: RequestGroup) -> None:
        """Record that the engine has accepted the request."""
        self.group = group
        if not self.accepted.done():
            self.accepted.set_result(None)

    def notify(self) -> None:
        """Wake those that wait for events."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Wait until there are more events or the run has ended, for `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


Generate = Callable[[BackgroundRun], Awaitable[None]]
"""Generates the response of a run, and gives it the events."""


class BackgroundRuns:
    """The background responses of one frontend.

    A run is recorded under the frontend's number until it has ended. If the frontend dies, its successor starts the
    unfinished runs again. Sampling depends on the seed and the position alone, and every event has the text of one
    token, so a repeated run has the same events.
    """

    def __init__(self, states: ResponseStates, generate: Generate, serving: Serving) -> None:
        self._states = states
        self._generate = generate
        self._serving = serving
        self._runs: dict[str, BackgroundRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, response_id: str, owner: str) -> BackgroundRun | None:
        """Return a run in this frontend; None if there is none of this owner."""
        run = self._runs.get(response_id)
        return run if run is not None and run.exchange.owner == owner else None

    async def start(self, run: BackgroundRun) -> None:
        """Start a run. Return when the engine has accepted and the store has recorded it.

        Raises:
            APIError: The request is invalid (400), or cannot be accepted now (429, 503).
        """
        if len(self._runs) >= MAX_RUNS:
            raise too_many_requests(
                f"{len(self._runs)} background responses are running, at most {MAX_RUNS} are allowed",
                RETRY_S,
            )
        self._runs[run.exchange.response_id] = run
        self._spawn(self._run(run))
        await run.accepted
        try:
            await self._record(run)
        except APIError:
            run.cancel()
            raise
        finally:
            run.is_recorded.set()

    async def resume(self) -> None:
        """Begin to start the runs again that a predecessor of this frontend did not finish.

        A predecessor that still runs has the store, which answers when it has ended.
        """
        self._spawn(self._resume_when_possible())

    async def _resume_when_possible(self) -> None:
        while not self._is_stopping:
            try:
                await self._resume_all()
                return
            except APIError as error:
                logger.warning("background responses wait for the store: %s", error.message)
                await asyncio.sleep(RETRY_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _resume_all(self) -> None:
        index = self._serving.engine.client_index
        places = [index]
        if index == 0:
            # There may have been more frontends.
            first = self._serving.config.parallel.api_server_count
            places += range(first, max(first, MAX_FRONTENDS))
        for place in places:
            parts, _ = await self._states.runs.read_parts(_place(place), SYSTEM)
            for part in parts:
                await self._resume_run(msgspec.json.decode(part, type=RunRecord))

    async def _resume_run(self, record: RunRecord) -> None:
        if record.response_id in self._runs:
            return
        identifier, owner = record.response_id, record.caller["owner"]
        stored = await self._states.responses.find(identifier, owner)
        if stored is None or stored["response"]["status"] in ENDED:
            await self._states.runs.delete(identifier, SYSTEM)
            return
        response = stored["response"]
        exchange = Exchange(
            record.body, identifier, response["created_at"], stored["input"], owner=owner
        )
        caller = record.caller | {"cache_owner": bytes.fromhex(record.caller["cache_owner"])}
        run = BackgroundRun(exchange, response, caller)
        run.num_attempts = record.num_attempts + 1
        try:
            exchange.context, _ = await self._states.read_items(record.body, identifier, owner)
            parts, _ = await self._states.events.read_parts(identifier, owner)
            run.num_stored_events = b"".join(parts).count(EVENT_END)
            if run.num_attempts > MAX_ATTEMPTS:
                raise internal_error(f"the response did not end in {MAX_ATTEMPTS} attempts")
            await self.start(run)
        except APIError as error:
            if not self._is_stopping:
                await self._finish(run, error)

    @property
    def _is_stopping(self) -> bool:
        """True if runs fail because the server stops; a successor finishes them."""
        return self._serving.engine.dead_reason is not None or self._serving.engine.draining

    async def _record(self, run: BackgroundRun) -> None:
        exchange = run.exchange
        record = RunRecord(
            exchange.response_id,
            exchange.body,
            run.caller | {"cache_owner": run.caller["cache_owner"].hex()},
            run.num_attempts,
        )
        await self._states.save(exchange, run.response)
        place = _place(self._serving.engine.client_index)
        await self._states.runs.put(exchange.response_id, record, SYSTEM, parent=place)

    async def _run(self, run: BackgroundRun) -> None:
        error: APIError | None = None
        keeper = asyncio.create_task(self._keep(run))
        try:
            await self._generate(run)
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
        run.notify()
        del self._runs[run.exchange.response_id]

    async def _finish(self, run: BackgroundRun, error: APIError | None) -> None:
        """Store the end of a run."""
        exchange = run.exchange
        try:
            if run.response["status"] not in ENDED:
                run.response = run.response | {
                    "status": "cancelled" if run.is_cancelled else "failed",
                    "error": None if error is None else describe_failure(error),
                }
                await self._states.save(exchange, run.response)
            await self._store_events(run)
            await self._states.runs.delete(exchange.response_id, SYSTEM)
        except APIError as failure:
            logger.warning("cannot store %s: %s", exchange.response_id, failure.message)

    async def _keep(self, run: BackgroundRun) -> None:
        """Store the state and the events of a run from time to time, and cancel it if its client wants that."""
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
                logger.warning("cannot store %s: %s", identifier, failure.message)

    async def _store_events(self, run: BackgroundRun) -> None:
        """Store the events that are not in the store, if the client wants to read them."""
        first, end = run.num_stored_events, len(run.events)
        if not run.exchange.body.stream or first >= end:
            return
        identifier = run.exchange.response_id
        await self._states.events.put(
            f"{identifier}/{first:08}",
            b"".join(run.events[first:end]),
            run.exchange.owner,
            parent=identifier,
        )
        run.num_stored_events = end


def _place(client_index: int) -> str:
    """Return the parent of the runs of a frontend."""
    return f"frontend {client_index}"
