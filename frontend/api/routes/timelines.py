"""`GET /debug/requests/{id}`: what happened to a request, from the event logs of the cores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import EngineError
from ...http.errors import APIError, bad_request, echo, json_response
from ..serving import Serving

REPLAY_S: Final = 60.0
"""Maximum seconds that a replay of one log may take."""

MAX_OUTPUT: Final = 1 << 20
"""Maximum characters of a timeline; the rest is cut."""

_ID: Final = re.compile(r"[!-.0-~/]{1,128}")


class Timelines:
    """Explains requests. The scheduler's module is not imported: `engine replay` runs in a process of its own."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._turn = asyncio.Lock()

    async def explain(self, request: Request) -> Response:
        """Dump the event logs, and return the timeline of a request from each that knows it."""
        serving, identifier = self._serving, request.path_params["id"]
        if serving.config.frontend.dump_dir is None:
            raise APIError(
                403,
                "This server was started without --dump-dir DIR; restart it with that flag",
                type="permission_error",
            )
        if not _ID.fullmatch(identifier) or identifier.startswith("-"):
            raise bad_request(
                "id", f"id must be the x-request-id of an answer, got {echo(identifier)}"
            )
        serving.verify_serving()
        # One dump at a time, because a core schedules nothing while it writes.
        async with self._turn:
            try:
                files = await serving.engine.dump_event_logs()
            except EngineError as error:
                raise APIError(500, f"The event log could not be written: {error}") from error
            found = []
            for file in files:
                found.append(await _replay(file, identifier))
                with contextlib.suppress(OSError):
                    os.unlink(file)
        timelines = [text for text in found if text]
        if not timelines:
            raise APIError(
                404, f"The event logs of the cores do not have the request {echo(identifier)}"
            )
        return json_response({"id": identifier, "timelines": timelines})


async def _replay(file: str, identifier: str) -> str:
    """Return what `engine replay --why` writes; "" if the log does not have the request."""
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
        raise APIError(
            500, f"The replay of the event log took more than {REPLAY_S:.0f} s"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return "" if process.returncode == 2 else output.decode(errors="replace")[:MAX_OUTPUT]
