"""Routes that load other weights of the served model, as SGLang and vLLM name them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.config.weights import ReplacedWeights, WeightsFiles
from ....protocol.errors import CheckpointError, ConfigError, EngineError
from ....protocol.messages import PauseMode
from ....protocol.supervisor_messages import Stage
from ...http.errors import APIError, bad_request, json_response, redact, unavailable, wrong
from ...http.shown_values import cut
from ...model_source.weights import find_weights
from ..bodies.intake import Intake, RouteHandlers, reads
from ..schema.sglang import SglangVersionRequest, SglangWeightsRequest
from ..schema.vllm import VllmCallRequest
from ..serving import Serving
from .pause import Pauses

MAX_SHOWN_PATH: Final = 200
"""Maximum characters of a path in an error message."""

RESUME_S: Final = 10.0
"""Maximum seconds for which the answer to an update waits until generation has been resumed."""

RESUME_POLL_S: Final = 0.2
"""Seconds between attempts to resume generation after an update."""

MAX_PATH: Final = 1024
"""Maximum length of a path, and of the name of weights, in characters."""


class Weights(RouteHandlers):
    """Routes that restart all cores and workers with other weights of the same model.

    Frontends keep the tokenizer. Requests that arrive meanwhile wait. If a worker cannot load the weights, all get the
    previous ones again.

    Generation is paused for an update. A file in the run directory names each frontend that has to resume it, so that
    its successor does so if it crashes.
    """

    def __init__(self, serving: Serving, intake: Intake) -> None:
        super().__init__(serving, intake)
        self._pauses = Pauses(serving, intake)
        self._files = WeightsFiles(serving.config.run_dir)
        self._lock = asyncio.Lock()
        self._resuming: asyncio.Task[None] | None = None
        serving.when_ready.append(self._continue_for_predecessor)

    @reads(SglangWeightsRequest)
    async def update_like_sglang(
        self, http: Request, body: SglangWeightsRequest, size: int
    ) -> Response:
        """Load weights from a directory, as SGLang's route does."""
        weights = await self._find(body.model_path, "model_path", body.weight_version or "")
        mode = PauseMode.ABORT if body.abort_all_requests else PauseMode.WAIT
        try:
            await self._update(weights, mode, stays_paused=bool(body.keep_pause))
        except EngineError as error:
            return json_response({"success": False, "message": redact(str(error))}, 400)
        message = "The weights were updated."
        return json_response({"success": True, "message": message, "num_paused_requests": 0})

    @reads(SglangVersionRequest)
    async def rename_like_sglang(
        self, http: Request, body: SglangVersionRequest, size: int
    ) -> Response:
        """Give the weights another name, by default after aborting all requests."""
        version = body.new_version
        if not 0 < len(version) <= MAX_PATH or not version.isprintable():
            raise wrong("new_version", f"1 to {MAX_PATH} visible characters", version)
        self._serving.verify_serving()
        try:
            if body.abort_all_requests is not False:
                await self._serving.engine.calls.abort_requests("")
            async with self._lock:
                if self._files.is_updating:
                    raise EngineError("the weights are being updated; retry later")
                await asyncio.to_thread(self._files.rename, version)
        except (EngineError, OSError) as error:
            return json_response({"success": False, "message": redact(str(error))}, 400)
        message = "The weights were renamed."
        return json_response({"success": True, "message": message, "new_version": version})

    @reads(VllmCallRequest)
    async def call_like_vllm(self, http: Request, body: VllmCallRequest, size: int) -> Response:
        """Load weights by `reload_weights`, the one method of vLLM's workers that has a counterpart."""
        if body.method != "reload_weights":
            raise wrong("method", '"reload_weights"', body.method)
        path = (body.kwargs or {}).get("weights_path", self._served_path)
        if not isinstance(path, str):
            raise wrong("kwargs.weights_path", "a string", path)
        weights = await self._find(path, "kwargs.weights_path", "")
        try:
            await self._update(weights, PauseMode.KEEP, stays_paused=False)
        except EngineError as error:
            message = f"The weights were not loaded: {redact(str(error))}"
            raise unavailable(message, self._serving.retry_after_s) from error
        return json_response({"results": [None] * self._serving.num_replicas})

    async def load(self, path: str, version: str) -> None:
        """Load weights that a trainer has sent. Unfinished requests continue with them.

        Raises:
            EngineError: They were not loaded.
            APIError: They belong to another model (400), or some replicas could not be paused (503).
        """
        weights = await self._find(path, "weights", version)
        await self._update(weights, PauseMode.KEEP, stays_paused=False)

    @property
    def _pause_mark(self) -> Path:
        serving = self._serving
        return Path(serving.config.run_dir, f"weights.pause.{serving.engine.client_index}")

    @property
    def _served_path(self) -> str:
        return self._files.read_current().path or self._serving.config.model.path

    async def _update(
        self, weights: ReplacedWeights, mode: PauseMode, *, stays_paused: bool
    ) -> None:
        """Pause, load the weights, and resume unless generation was paused before.

        Raises:
            EngineError: The weights were not loaded.
            APIError: Some replicas could not be paused (503).
        """
        self._serving.verify_serving()
        engine = self._serving.engine
        async with self._lock:
            pauses = not engine.sleep.is_asleep and not engine.calls.is_paused()
            resumes = pauses and not stays_paused
            if resumes:
                try:
                    await asyncio.to_thread(self._pause_mark.touch)
                except OSError as error:
                    raise EngineError(f"the run directory cannot be written: {error}") from error
            try:
                if pauses:
                    await self._pauses.pause_all(mode, clear_cache=mode is not PauseMode.KEEP)
                await engine.sleep.load_weights(self._files, weights)
            finally:
                if resumes:
                    self._resuming = asyncio.create_task(self._resume())
                    await asyncio.wait({self._resuming}, timeout=RESUME_S)

    async def _continue_for_predecessor(self) -> None:
        """Resume generation if this frontend replaces one that crashed during an update."""
        if self._pause_mark.exists():
            self._resuming = asyncio.create_task(self._resume())

    async def _resume(self) -> None:
        """Resume generation on all replicas, and wait for those that restart."""
        while self._serving.stage is Stage.READY:
            try:
                if not self._files.is_updating:
                    await self._serving.engine.calls.resume()
                    break
            except EngineError:
                # A replica is not up. Its next core would be paused, because the frontends say so.
                pass
            await asyncio.sleep(RESUME_POLL_S)
        self._pause_mark.unlink(missing_ok=True)

    async def _find(self, path: str, param: str, version: str) -> ReplacedWeights:
        """Return the weights at a path, or on the hub.

        Raises:
            APIError: They do not exist, or belong to another model (400).
        """
        if not 0 < len(path) <= MAX_PATH or not path.isprintable():
            raise wrong(param, f"a path of at most {MAX_PATH} visible characters", path)
        if self._serving.config.parallel.is_distributed:
            raise bad_request(param, "needs a server whose workers are on one machine")
        try:
            return await asyncio.to_thread(find_weights, self._serving.config.model, path, version)
        except (CheckpointError, ConfigError) as error:
            problem = str(error).replace(path, cut(path, MAX_SHOWN_PATH))
            raise APIError(400, f"{param}: {problem}", param=param) from None
