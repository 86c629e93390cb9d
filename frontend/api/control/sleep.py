"""Routes that unload the model from memory and load it again, as vLLM and SGLang name them."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import EngineError
from ....protocol.messages import PauseMode
from ...http.errors import json_response, redact, unavailable, wrong
from ..bodies.intake import Intake, RouteHandlers, reads
from ..schema.sglang import SglangMemoryRequest
from ..serving import Serving
from .pause import Pauses, read_mode

LEVELS: Final = ("0", "1", "2")
"""vLLM's levels of sleep. Level 0 only pauses. Levels 1 and 2 do the same here: all memory of the model is freed."""

TAGS: Final = ("weights", "kv_cache", "scheduling", "cuda_graph")
"""The parts that vLLM and SGLang can free and load. Here they share the processes that stop and start."""

_STEPS: Final = frozenset({"kv_cache", "scheduling"})
"""The tags without which generation stays paused after the model is loaded."""


class Sleep(RouteHandlers):
    """Routes that stop the cores and workers of all replicas, and start them again.

    Unfinished requests and those that arrive meanwhile wait. They get the same tokens afterwards.
    """

    def __init__(self, serving: Serving, intake: Intake) -> None:
        super().__init__(serving, intake)
        self._pauses = Pauses(serving, intake)

    async def sleep(self, request: Request) -> Response:
        """Unload the model. Answer when its memory is free."""
        level = request.query_params.get("level", "1")
        if level not in LEVELS:
            raise wrong("level", f"one of {', '.join(LEVELS)}", level)
        await self._sleep(read_mode(request), unloads=level != "0")
        return json_response({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: Request) -> Response:
        """Load the model again. Answer when it is loaded."""
        tags = request.query_params.getlist("tags")
        await self._wake(tags)
        status = "sleeping" if self._serving.engine.calls.is_paused() else "awake"
        return json_response({"status": status, "tags": tags or None})

    async def release_kv_cache(self, request: Request) -> Response:
        """Unload the model after a sleep of level 0, which keeps it in memory."""
        await self._sleep(PauseMode.KEEP, unloads=True)
        return json_response({"status": "kv_cache_released"})

    async def is_sleeping(self, request: Request) -> Response:
        """Return whether the model is unloaded or generation is paused."""
        self._serving.verify_serving()
        engine = self._serving.engine
        is_sleeping = engine.sleep.is_asleep or engine.calls.is_paused()
        return json_response({"is_sleeping": is_sleeping})

    @reads(SglangMemoryRequest)
    async def release(self, http: Request, body: SglangMemoryRequest, size: int) -> Response:
        """Unload the model, as SGLang's route does."""
        _verify_tags(body.tags or [])
        await self._sleep(PauseMode.KEEP, unloads=True)
        return Response()

    @reads(SglangMemoryRequest)
    async def take_back(self, http: Request, body: SglangMemoryRequest, size: int) -> Response:
        """Load the model again, as SGLang's route does."""
        await self._wake(body.tags or [])
        return Response()

    async def _sleep(self, mode: PauseMode, *, unloads: bool) -> None:
        sleep = self._serving.engine.sleep
        if not sleep.is_asleep:
            await self._pauses.pause_all(mode, clear_cache=unloads and mode is not PauseMode.KEEP)
        if unloads:
            try:
                await sleep.sleep()
            except EngineError as error:
                message = f"The model was not unloaded: {redact(str(error))}"
                raise unavailable(message, self._serving.retry_after_s) from error

    async def _wake(self, tags: list[str]) -> None:
        _verify_tags(tags)
        self._serving.verify_serving()
        try:
            await self._serving.engine.sleep.wake()
        except EngineError as error:
            message = f"The model was not loaded: {redact(str(error))}"
            raise unavailable(message, self._serving.retry_after_s) from error
        if (not tags or _STEPS & {*tags}) and self._serving.engine.calls.is_paused():
            await self._pauses.resume_all()


def _verify_tags(tags: list[str]) -> None:
    for tag in tags:
        if tag not in TAGS:
            raise wrong("tags", f"some of {', '.join(TAGS)}", tag)
