"""Routes that pause and resume generation, as vLLM and SGLang name them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import EngineError
from ....protocol.messages import PauseMode
from ...http.errors import json_response, redact, unavailable, wrong
from ..bodies.intake import RouteHandlers, reads
from ..schema.sglang import SglangPauseRequest

_SGLANG_MODES = {
    "abort": PauseMode.ABORT,
    "retract": PauseMode.KEEP,
    "in_place": PauseMode.KEEP,
}


class Pauses(RouteHandlers):
    """Routes that pause and resume all replicas.

    Requests that arrive during a pause wait. Shutting down ends a pause.
    """

    async def pause(self, request: Request) -> Response:
        """Pause generation. Answer when nothing is computed any more."""
        query, mode = request.query_params, read_mode(request)
        if _is_true(query.get("wait_for_inflight_requests", "false"), "wait_for_inflight_requests"):
            mode = PauseMode.WAIT
        clear_cache = _is_true(query.get("clear_cache", "true"), "clear_cache")
        await self.pause_all(mode, clear_cache=clear_cache)
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Resume generation."""
        await self.resume_all()
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Return whether generation is paused."""
        self._serving.verify_serving()
        return json_response({"is_paused": self._serving.engine.calls.is_paused()})

    @reads(SglangPauseRequest)
    async def pause_like_sglang(
        self, http: Request, body: SglangPauseRequest, size: int
    ) -> Response:
        """Pause generation in a mode of SGLang's."""
        name = body.mode or "abort"
        mode = _SGLANG_MODES.get(name)
        if mode is None:
            raise wrong("mode", f"one of {', '.join(_SGLANG_MODES)}", name)
        await self.pause_all(mode, clear_cache=False)
        if name == "retract":
            # Running requests give up their blocks and compute them again after the pause.
            await self._serving.engine.calls.reset_prefix_cache(True)
        return json_response({"status": "ok", "message": "Generation is paused."})

    @reads(SglangPauseRequest)
    async def resume_like_sglang(
        self, http: Request, body: SglangPauseRequest, size: int
    ) -> Response:
        """Resume generation."""
        await self.resume_all()
        return json_response({"status": "ok", "message": "Generation continues."})

    async def pause_all(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause all replicas. Raises APIError 503 if some were not paused."""
        self._serving.verify_serving()
        try:
            await self._serving.engine.calls.pause(mode, clear_cache=clear_cache)
        except EngineError as error:
            message = f"Some replicas were not paused: {redact(str(error))}"
            raise unavailable(message, self._serving.retry_after_s) from error

    async def resume_all(self) -> None:
        """Resume all replicas. Raises APIError 503 if some were not resumed."""
        self._serving.verify_serving()
        try:
            await self._serving.engine.calls.resume()
        except EngineError as error:
            message = f"Some replicas were not resumed: {redact(str(error))}"
            raise unavailable(message, self._serving.retry_after_s) from error


def read_mode(request: Request) -> PauseMode:
    """Return the mode in the query of a request. Raises APIError 400 if it is invalid."""
    text = request.query_params.get("mode", PauseMode.ABORT)
    if text not in set(PauseMode):
        raise wrong("mode", f"one of {', '.join(PauseMode)}", text)
    return PauseMode(text)


def _is_true(text: str, param: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise wrong(param, "true or false", text)
    return text.lower() in ("true", "1")
