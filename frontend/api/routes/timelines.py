"""`GET /debug/requests` and `GET /debug/requests/{id}`: list recent requests, and explain what happened to one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import EngineError
from ...client.groups.recent_requests import RecentRequest
from ...http.errors import APIError, echo, json_response, wrong
from ..logprobs import Json
from ..serving import Serving

REPLAY_S: Final = 60.0
"""Maximum seconds that a replay of one log may take."""

MAX_OUTPUT: Final = 1 << 20
"""Maximum characters of a timeline; the rest is cut."""

_ID: Final = re.compile(r"[!-.0-~/]{1,128}")


class Timelines:
    """Explains requests. `engine replay` runs in a separate process, because this one must not import the scheduler."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._turn = asyncio.Lock()

    async def list(self, request: Request) -> Response:
        """Return the times and counts of this frontend's running and recently ended requests."""
        serving = self._serving
        recent = serving.engine.list_recent_requests()
        now = time.monotonic()
        return json_response(
            {
                "time": time.time(),
                "can_explain": serving.config.frontend.dump_dir is not None,
                "frontend": serving.engine.client_index,
                "num_frontends": serving.config.parallel.api_server_count,
                "requests": [_describe(each, now) for each in recent],
            }
        )

    async def explain(self, request: Request) -> Response:
        """Dump the event logs of all cores, and return the timeline of a request from each log that contains it."""
        serving, identifier = self._serving, request.path_params["id"]
        if serving.config.frontend.dump_dir is None:
            raise APIError(
                403,
                "This server was started without --dump-dir DIR; restart it with that flag",
                type="permission_error",
            )
        if not _ID.fullmatch(identifier) or identifier.startswith("-"):
            raise wrong("id", "the x-request-id of an answer", identifier)
        serving.verify_serving()
        # One dump at a time, because a core schedules nothing while it writes.
        async with self._turn:
            try:
                files = await serving.engine.calls.dump_event_logs()
            except EngineError as error:
                raise APIError(500, f"Cannot write the event log: {error}") from error
            found = []
            for file in files:
                found.append(await _replay(file, identifier))
                with contextlib.suppress(OSError):
                    os.unlink(file)
        timelines = [text for text in found if text]
        if not timelines:
            raise APIError(
                404,
                "The event logs of the cores do not contain the request "
                f"{echo(identifier)}; only recent requests are kept",
            )
        return json_response({"id": identifier, "timelines": timelines})


def _describe(request: RecentRequest, now: float) -> Json:
    """Return a request as JSON. Times are milliseconds since its arrival; null if the event has not occurred."""

    def since_arrival(time: float) -> float | None:
        return round(1000 * (time - request.arrival_time), 3) if time else None

    return {
        "id": request.id,
        "lora": request.lora or None,
        "replica": request.replica,
        "age_ms": round(1000 * (now - request.arrival_time), 3),
        "scheduled_ms": since_arrival(request.scheduled_time),
        "first_token_ms": since_arrival(request.first_token_time),
        "last_token_ms": since_arrival(request.last_token_time),
        "finished_ms": since_arrival(request.finish_time),
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "generated_tokens": request.generated_tokens,
        "accepted_draft_tokens": request.draft_tokens,
        "preemptions": request.preemptions,
        "sequences": request.num_sequences,
        "finish_reason": request.outcome or None,
    }


async def _replay(file: str, identifier: str) -> str:
    """Return the output of `engine replay --why`; "" if the log does not contain the request."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "engine.core.replay", file, "--why", identifier),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(REPLAY_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise APIError(500, f"Replaying the event log took more than {REPLAY_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return "" if process.returncode == 2 else output.decode(errors="replace")[:MAX_OUTPUT]
