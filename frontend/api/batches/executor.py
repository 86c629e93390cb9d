"""Executes batches, in one frontend of the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from ....protocol.supervisor_messages import Stage
from ...http.errors import APIError
from ...store.client import StoreError
from ..files.storage import FileStorage
from ..logprobs import Json
from ..serving import Serving
from .internal_call import CallResult, call_route
from .lines import BatchLine, error_line, find_errors, parse_line, result_line, split_lines
from .records import ENDED, BatchRecords, BatchWork, result_key

logger = logging.getLogger(__name__)

POLL_S: Final = 2.0
"""Seconds between looks for new batches of other frontends."""

REPORT_S: Final = 1.0
"""Seconds between reports of progress, and looks whether a batch was cancelled."""

ROOM_S: Final = 0.02
"""Seconds between looks whether there is room for a request."""

SHARE_OF_SLOTS: Final = 0.5
"""Share of `--max-num-seqs` up to which requests of batches start. The rest is free for interactive requests."""

MAX_AT_ONCE: Final = 256
"""Maximum number of requests of a batch that run at once."""

LOW_PRIORITY: Final = 1 << 20
"""The priority of requests without one of their own, for `--scheduling-policy priority`."""

MAX_RETRY_S: Final = 30.0
"""Maximum seconds before a request is sent again that found no room."""


DUTY: Final = "batches"
"""The duty of the frontend that executes batches."""


class BatchExecutor:
    """Executes one batch after the other.

    The first frontend does it for all. While one server takes the place of another, only one of their frontends does.
    Every answer is stored before the next step, so its successor, also after a restart of the server, sends only the
    requests without an answer.
    """

    def __init__(self, serving: Serving, records: BatchRecords, files: FileStorage) -> None:
        self._serving = serving
        self._records = records
        self._files = files
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._running: _BatchRun | None = None

    async def start(self) -> None:
        """Begin to execute batches, if this is the first frontend."""
        if self._serving.engine.client_index == 0:
            self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look for a new batch at once."""
        self._wake.set()

    def cancel(self, batch_id: str) -> None:
        """Cancel a batch at once if it is the one that is executed here."""
        if self._running is not None and self._running.batch_id == batch_id:
            self._running.cancel()

    @property
    def _is_stopping(self) -> bool:
        return is_stopping(self._serving)

    async def _run(self) -> None:
        while not self._is_stopping:
            try:
                has_duty = await self._serving.store.take_duty(DUTY)
                works = await self._records.list_work() if has_duty else []
                for work in works:
                    await self._execute(work)
                if not works:
                    await self._wait(POLL_S)
            except (APIError, StoreError) as error:
                logger.warning("cannot execute batches at the moment: %s", error)
                await asyncio.sleep(POLL_S)
            except Exception:
                logger.exception("a batch failed")
                await asyncio.sleep(POLL_S)
        self._serving.store.leave_duty(DUTY)

    async def _wait(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        self._wake.clear()

    async def _execute(self, work: BatchWork) -> None:
        batch = await self._records.find(work)
        if batch is None or batch["status"] in ENDED:
            await self._records.finish(work, None)
            return
        self._running = _BatchRun(self._serving, self._records, self._files, work, batch)
        try:
            await self._running.run()
        finally:
            self._running = None


class _BatchRun:
    """The execution of one batch."""

    def __init__(
        self,
        serving: Serving,
        records: BatchRecords,
        files: FileStorage,
        work: BatchWork,
        batch: Json,
    ) -> None:
        self._serving = serving
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
            # The server stops. Its successor continues.
            return
        await self._finalize()

    @property
    def batch_id(self) -> str:
        """The identifier of the batch."""
        return self._work.batch_id

    def cancel(self) -> None:
        """End the batch with the answers that it has."""
        self._is_cancelled = True

    @property
    def _is_expired(self) -> bool:
        return time.time() > float(self._batch["expires_at"])

    @property
    def _is_over(self) -> bool:
        return self._is_cancelled or self._is_expired

    async def _read_lines(self) -> bool:
        """Read the requests. Return False for a batch whose file is invalid, which has failed then."""
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
        """Find out which requests have been answered before."""
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
        """Send the requests without an answer as there is room for them."""
        tasks: set[asyncio.Task[None]] = set()
        reporter = asyncio.create_task(self._report())
        try:
            for number in range(len(self._lines)):
                if number in self._answered:
                    continue
                while not self._may_start(len(tasks)):
                    if self._is_over or self._is_stopping:
                        break
                    await asyncio.sleep(ROOM_S)
                if self._is_over or self._is_stopping:
                    break
                task = asyncio.create_task(self._answer(number))
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

    def _may_start(self, num_running: int) -> bool:
        return num_running < MAX_AT_ONCE and self._serving.engine.has_idle_slots(SHARE_OF_SLOTS)

    async def _answer(self, number: int) -> None:
        """Send a request until the server accepts it, and store its answer."""
        request = parse_line(self._lines[number], self._batch["endpoint"])
        try:
            result = await self._call(request)
        except Exception:
            logger.exception("request %d of %s failed", number, self._batch["id"])
            line = error_line(request.custom_id, "server_error", "Internal server error")
        else:
            if result is None:
                return
            body = msgspec.Raw(result.body)
            line = result_line(request.custom_id, result.status, result.request_id, body)
        record = {"number": number, "line": line}
        key = result_key(self._batch["id"], number)
        await self._records.results.put(key, record, self._work.owner, parent=self._batch["id"])
        self._count(number, line)

    async def _call(self, request: BatchLine) -> CallResult | None:
        """Return the answer to a request; None if the server stops before there is one."""
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
        """Store the progress from time to time, and find out whether the batch was cancelled."""
        while True:
            await asyncio.sleep(REPORT_S)
            with contextlib.suppress(APIError):
                await self._records.put(self._batch, self._work.owner)
                found = await self._records.find(self._work)
                if found is None or found["status"] == "cancelling":
                    self._is_cancelled = True

    async def _finalize(self) -> None:
        """Write the files of the batch."""
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
        """Yield the lines of the output file or of the error file."""
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
    """Return whether this server begins nothing new by itself, and may not finish what it does."""
    is_draining = serving.stage is Stage.DRAINING
    return serving.is_retired or is_draining or serving.engine.dead_reason is not None


def is_success(line: Json) -> bool:
    """Return whether a request was answered without an error."""
    response: Any = line["response"]
    return response is not None and response["status_code"] < 400


def _now() -> int:
    return int(time.time())
