"""Execute batches in one frontend of the server: at most one batch per tenant at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator
from typing import Any, Final

import msgspec

from ....protocol.heartbeat import seconds_to_beat
from ....protocol.supervisor_messages import Stage
from ...http.errors import APIError
from ...store.client import StoreError
from ..files.storage import FileStorage
from ..logprobs import Json
from ..serving import Serving
from .internal_call import CallResult, call_route
from .lines import BatchLine, error_line, find_errors, parse_line, result_line, split_lines
from .records import ENDED, BatchRecords, BatchWork, result_key
from .turns import ROOM_S, Turns

logger = logging.getLogger(__name__)

POLL_S: Final = 10.0
"""Seconds between attempts to take the duty to execute batches, while no object is created."""

RETRY_S: Final = 2.0
"""Seconds after which a batch that could not be executed is tried again."""

REPORT_S: Final = 1.0
"""Seconds between progress reports, each with a check whether the batch was cancelled."""

SHARE_OF_SLOTS: Final = 0.5
"""Share of `--max-num-seqs` below which requests of batches start. The rest is free for interactive requests."""

MAX_AT_ONCE: Final = 256
"""Maximum number of requests of batches that run at once."""

MAX_TENANTS: Final = 8
"""Maximum number of tenants whose batches are executed at once, because each input file is held in memory."""

LOW_PRIORITY: Final = 1 << 20
"""The priority of batch requests that set none, for `--scheduling-policy priority`."""

MAX_RETRY_S: Final = 30.0
"""Maximum seconds before a request is sent again after the server had no room for it."""


DUTY: Final = "batches"
"""The name of the duty in the store. The frontend that has it executes batches."""


class BatchExecutor:
    """Executes the batches of each tenant one after the other, and alternates between tenants.

    The first frontend executes the batches of the whole server. During an upgrade, only one of the two servers does.
    Every answer is stored before the next step. So a successor, for example after a restart, sends only the requests
    that have no answer yet.

    Attributes:
        records: The stored batches.
        files: The stored files, which batches read and write.
    """

    def __init__(self, serving: Serving, files: FileStorage) -> None:
        self._serving = serving
        self.records = BatchRecords(serving.store)
        self.files = files
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Tenant -> the task that executes its batch."""
        self._runs: dict[str, _BatchRun] = {}
        self._flow = _Flow(serving)

    async def start(self) -> None:
        """Begin to execute batches, if this is the first frontend."""
        if self._serving.engine.client_index == 0:
            # Other frontends create batches, too.
            self._serving.store.on_objects = self.wake
            self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look for a new batch immediately."""
        self._wake.set()

    def cancel(self, batch_id: str) -> None:
        """Cancel a batch immediately if this frontend is executing it."""
        if (run := self._runs.get(batch_id)) is not None:
            run.cancel()

    @property
    def _is_stopping(self) -> bool:
        return is_stopping(self._serving)

    async def _run(self) -> None:
        while not self._is_stopping:
            try:
                has_duty = await self._serving.store.take_duty(DUTY)
                for work in await self.records.list_work() if has_duty else []:
                    if work.owner not in self._tasks and len(self._tasks) < MAX_TENANTS:
                        self._tasks[work.owner] = asyncio.create_task(self._execute(work))
            except (APIError, StoreError) as error:
                logger.warning("cannot execute batches at the moment: %s", error)
            await self._wait(seconds_to_beat(POLL_S))
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        self._serving.store.leave_duty(DUTY)

    async def _wait(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        self._wake.clear()

    async def _execute(self, work: BatchWork) -> None:
        """Execute a batch. If that fails, the tenant's oldest batch is tried again."""
        try:
            await self._execute_once(work)
        except APIError as error:
            logger.warning("cannot execute %s at the moment: %s", work.batch_id, error.message)
            await asyncio.sleep(RETRY_S)
        except Exception:
            logger.exception("%s failed", work.batch_id)
            await asyncio.sleep(RETRY_S)
        finally:
            del self._tasks[work.owner]
            self.wake()

    async def _execute_once(self, work: BatchWork) -> None:
        batch = await self.records.find(work)
        if batch is None or batch["status"] in ENDED:
            await self.records.finish(work, None)
            return
        run = _BatchRun(self._serving, self._flow, self.records, self.files, work, batch)
        self._runs[work.batch_id] = run
        try:
            await run.run()
        finally:
            del self._runs[work.batch_id]


class _Flow:
    """The running requests of all batches, and the turns in which new requests start."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._num_running = 0
        self.turns = Turns(self._has_room)

    def _has_room(self) -> bool:
        """Return whether a request may start. Requests that have not reached the engine yet count as running."""
        num_slots = self._serving.config.scheduler.max_num_seqs * self._serving.num_replicas
        limit = min(MAX_AT_ONCE, max(1, int(SHARE_OF_SLOTS * num_slots)))
        return self._num_running < limit and self._serving.engine.has_idle_slots(SHARE_OF_SLOTS)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a request of a batch as a task, which counts as running until it ends."""
        self._num_running += 1
        task = asyncio.create_task(work)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._num_running -= 1


class _BatchRun:
    """The execution of one batch."""

    def __init__(
        self,
        serving: Serving,
        flow: _Flow,
        records: BatchRecords,
        files: FileStorage,
        work: BatchWork,
        batch: Json,
    ) -> None:
        self._serving = serving
        self._flow = flow
        self._records = records
        self._files = files
        self._work = work
        self._batch = batch
        self._lines: list[bytes] = []
        self._answered: set[int] = set()
        self._is_cancelled = batch["status"] == "cancelling"

    async def run(self) -> None:
        """Execute the batch until it has ended or the server stops."""
        batch, work = self._batch, self._work
        if not await self._read_lines():
            return
        if batch["status"] == "validating":
            batch |= {"status": "in_progress", "in_progress_at": _now()}
        await self._read_answers()
        await self._records.put(batch, work.owner)
        await self._answer_all()
        if not self._is_over and len(self._answered) < len(self._lines):
            # The server is shutting down. Its successor continues the batch.
            return
        await self._finalize()

    def cancel(self) -> None:
        """End the batch early, with the answers that it has."""
        self._is_cancelled = True

    @property
    def _is_expired(self) -> bool:
        return time.time() > float(self._batch["expires_at"])

    @property
    def _is_over(self) -> bool:
        return self._is_cancelled or self._is_expired

    async def _read_lines(self) -> bool:
        """Read the requests. If the input file is invalid, fail the batch and return False."""
        batch, work = self._batch, self._work
        try:
            content = await self._files.read(batch["input_file_id"], work.owner)
        except APIError as error:
            if error.status != 404:
                raise
            num_lines = 0
            errors = [{"code": "file_not_found", "line": None, "message": error.message, "param": "input_file_id"}]  # fmt: skip
        else:
            run = self._serving.executor.run
            self._lines = await run(len(content), lambda: list(split_lines(content)))
            num_lines, errors = await run(
                len(content), lambda: find_errors(self._lines, batch["endpoint"])
            )
        batch["request_counts"]["total"] = num_lines
        if errors:
            batch |= {
                "status": "failed",
                "failed_at": _now(),
                "errors": {"object": "list", "data": errors},
            }
            await self._records.finish(work, batch)
        return not errors

    async def _read_answers(self) -> None:
        """Find out which requests were answered before."""
        counts = self._batch["request_counts"]
        counts |= {"completed": 0, "failed": 0}
        parts, _ = await self._records.results.read_parts(self._batch["id"], self._work.owner)
        for part in parts:
            result = msgspec.json.decode(part)
            self._count(result["number"], result["line"])

    def _count(self, number: int, line: Json) -> None:
        self._answered.add(number)
        self._batch["request_counts"]["completed" if is_success(line) else "failed"] += 1

    async def _answer_all(self) -> None:
        """Send the requests without an answer when there is capacity for them, alternately with other batches."""
        tasks: set[asyncio.Task[None]] = set()
        reporter = asyncio.create_task(self._report())
        try:
            for number in range(len(self._lines)):
                if number in self._answered:
                    continue
                if not await self._flow.turns.wait(lambda: self._is_over or self._is_stopping):
                    break
                task = self._flow.start(self._answer(number))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while tasks and not self._is_over:
                await asyncio.wait(tasks, timeout=ROOM_S)
        finally:
            reporter.cancel()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    @property
    def _is_stopping(self) -> bool:
        return is_stopping(self._serving)

    async def _answer(self, number: int) -> None:
        """Send a request until the server accepts it, and store the answer."""
        request = parse_line(self._lines[number], self._batch["endpoint"])
        try:
            result = await self._call(request)
        except Exception:
            logger.exception("request %d of %s failed", number, self._batch["id"])
            line = error_line(request.custom_id, "server_error", "Internal server error")
        else:
            if result is None:
                return
            line = result_line(
                request.custom_id,
                result.status,
                result.request_id,
                result.body,
                result.content_type,
            )
        record = {"number": number, "line": line}
        key = result_key(self._batch["id"], number)
        await self._records.results.put(key, record, self._work.owner, parent=self._batch["id"])
        self._count(number, line)

    async def _call(self, request: BatchLine) -> CallResult | None:
        """Return the answer to a request; None if the server shuts down before there is one."""
        body = msgspec.json.encode({"priority": LOW_PRIORITY} | request.body)
        assert self._serving.router is not None
        while True:
            result = await call_route(self._serving.router, request.url, body, self._work.identity)
            if self._is_stopping and result.status >= 500:
                return None
            if result.retry_after_s is None:
                return result
            await asyncio.sleep(min(result.retry_after_s, MAX_RETRY_S))

    async def _report(self) -> None:
        """Store the progress if it is time to do so, and check whether the batch was cancelled."""
        while True:
            await asyncio.sleep(REPORT_S)
            with contextlib.suppress(APIError):
                await self._records.put(self._batch, self._work.owner)
                found = await self._records.find(self._work)
                if found is None or found["status"] == "cancelling":
                    self._is_cancelled = True

    async def _finalize(self) -> None:
        batch, work = self._batch, self._work
        batch |= {"status": "finalizing", "finalizing_at": _now()}
        await self._records.put(batch, work.owner)
        parts, _ = await self._records.results.read_parts(batch["id"], work.owner)
        results: dict[int, Json] = {}
        for part in parts:
            result = msgspec.json.decode(part)
            results[result["number"]] = result["line"]
        is_complete = len(results) == len(self._lines)
        for kind in ("output", "error"):
            lines = self._lines_of(kind, results, is_expired=not is_complete and self._is_expired)
            first = next(lines, None)
            if first is None:
                continue
            file = await self._files.create(
                f"{batch['id']}_{kind}.jsonl",
                "batch_output",
                [b"".join((first, *lines))],
                work.owner,
                work.expires_s,
            )
            batch[f"{kind}_file_id"] = file["id"]
        status = "completed" if is_complete else "cancelled" if self._is_cancelled else "expired"
        batch |= {"status": status, f"{status}_at": _now()}
        await self._records.finish(work, batch)

    def _lines_of(
        self, kind: str, results: dict[int, Json], *, is_expired: bool
    ) -> Iterator[bytes]:
        """Yield the lines of the output file or the error file."""
        for number, request in enumerate(self._lines):
            line = results.get(number)
            if line is None:
                if not is_expired or kind == "output":
                    continue
                identifier = parse_line(request, None).custom_id
                message = "This request could not be answered before the batch expired."
                line = error_line(identifier, "batch_expired", message)
            elif is_success(line) is not (kind == "output"):
                continue
            yield msgspec.json.encode(line) + b"\n"


def is_stopping(serving: Serving) -> bool:
    """Return whether this server is shutting down, and therefore starts no batch requests."""
    is_draining = serving.stage is Stage.DRAINING
    return serving.is_retired or is_draining or serving.engine.dead_reason is not None


def is_success(line: Json) -> bool:
    """Return whether a request was answered without an error."""
    response: Any = line["response"]
    return response is not None and response["status_code"] < 400


def _now() -> int:
    return int(time.time())
