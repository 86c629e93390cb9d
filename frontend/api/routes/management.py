"""Routes for operators, probes and load balancers: models, health, status, metrics and caches."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .... import __version__
from ....protocol.errors import EngineError
from ...http.errors import APIError, json_response, redact, retry_after, unavailable
from ...media.sources.kept_media import KeptMedia
from ..serving import Serving
from .capabilities import list_for_llama_cpp


class Management:
    """Routes for operators, probes and load balancers."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """List the served model names."""
        names = self._serving.served_models
        cards = [self.card(name) for name in names]
        # Anthropic's clients expect a page of models, and llama.cpp's look for capabilities.
        page = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        capabilities = list_for_llama_cpp(self._serving)
        described = [
            {"name": name, "model": name, "type": "model", "capabilities": capabilities}
            for name in names
        ]
        return json_response({"object": "list", "data": cards, "models": described} | page)

    async def model(self, request: Request) -> Response:
        """Describe one served model."""
        name = request.path_params["name"]
        self._serving.verify_model(name)
        return json_response(self.card(name))

    def card(self, name: str) -> dict[str, object]:
        """Return the description of a served model."""
        model = self._serving.config.model
        adapter = None if name in model.served_names else self._serving.loras.find(name)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "engine",
            "root": model.model if adapter is None else adapter.path,
            "parent": None if adapter is None else model.served_names[0],
            "max_model_len": model.max_model_len,
            # These are the field names of Anthropic's API.
            "type": "model",
            "display_name": name,
            "max_input_tokens": model.max_model_len,
            "max_tokens": model.max_model_len,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            # These are the field names of llama.cpp's API.
            "aliases": [] if adapter is not None else list(model.served_names),
            "tags": [],
            "meta": {
                "n_vocab": model.vocab_size,
                "n_ctx": model.max_model_len,
                "n_embd": model.hidden_size or model.pooler.hidden_size,
                "size": sum(file.size for file in model.weight_files),
            },
        }

    async def livez(self, request: Request) -> Response:
        """Return 200 unless the engine has failed for good. The supervisor restarts processes that crash or hang."""
        engine = self._serving.engine
        is_alive = engine.watch is None or not engine.watch.is_supervisor_silent
        return self._status(is_alive and engine.dead_reason is None)

    async def readyz(self, request: Request) -> Response:
        """Return 200 while the server is healthy, would answer a request, and has room for one more."""
        engine = self._serving.engine
        can_answer = not (engine.find_overload() or engine.sleep.awaits_operator)
        return self._status(self._is_healthy and can_answer)

    async def health(self, request: Request) -> Response:
        """Return 200 from the first generated token until draining begins, while every process makes progress."""
        return self._status(self._is_healthy)

    @property
    def _is_healthy(self) -> bool:
        return self._serving.is_ready and not self._serving.stalled_process

    async def engine_status(self, request: Request) -> Response:
        """Return the state of every process of the engine."""
        watch = self._serving.engine.watch
        processes = [] if watch is None else watch.status.processes
        return json_response(
            {
                "stage": self._serving.stage,
                "trouble": self._serving.degraded_replicas,
                "processes": [msgspec.to_builtins(process) for process in processes],
            }
        )

    def _status(self, good: bool) -> Response:
        serving = self._serving
        dead = serving.engine.dead_reason
        overload = serving.engine.find_overload() if self._is_healthy else None
        state = "ready" if self._is_healthy and not overload else "not ready"
        body = {
            "state": "asleep" if self._is_healthy and serving.engine.sleep.is_asleep else state,
            "stage": "failed" if dead else serving.stage,
            "detail": redact(dead)
            if dead
            else serving.detail or str(overload or serving.degraded_replicas),
        }
        if trouble := serving.store.state.trouble:
            body["store"] = f"not durable: {redact(trouble)}"
        if good:
            # Clients of llama.cpp read `status`.
            return json_response({"status": "ok"} | body)
        retry_after_s = overload.retry_after_s if overload else serving.retry_after_s
        return json_response(body, 503, retry_after(retry_after_s))

    async def metrics(self, request: Request) -> Response:
        """Return Prometheus metrics."""
        accept = request.headers.get("accept", "")
        body, content_type = self._serving.engine.metrics.render(accept)
        return Response(body, headers={"content-type": content_type})

    async def version(self, request: Request) -> Response:
        """Return the version of Engine."""
        return json_response({"version": __version__})

    async def load(self, request: Request) -> Response:
        """Return the number of running and waiting sequences of all frontends."""
        return json_response({"server_load": self._serving.engine.metrics.count_unfinished()})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Empty the prefix caches of all replicas."""
        self._serving.verify_serving()
        reset_running = request.query_params.get("reset_running_requests", "false") == "true"
        try:
            is_reset = await self._serving.engine.calls.reset_prefix_cache(reset_running)
        except EngineError as error:
            message = f"Some prefix caches were not reset: {redact(str(error))}"
            raise unavailable(message, self._serving.retry_after_s) from error
        if not is_reset:
            raise APIError(
                409,
                "The prefix cache is in use; wait until no request is running, "
                "or use ?reset_running_requests=true",
                type="conflict_error",
            )
        return json_response({"success": True})

    async def reset_media_cache(self, request: Request) -> Response:
        """Delete the images, videos and audio that later requests could refer to by their `uuid`."""
        directory = Path(self._serving.config.run_dir, "media")
        await self._serving.executor.run(0, KeptMedia(directory).clear)
        return json_response({"success": True})

    async def reset_encoder_cache(self, request: Request) -> Response:
        """Accept vLLM's call. Encoder outputs are found by content and weights, so none can be out of date."""
        return json_response({"success": True})

    async def dump_event_logs(self, request: Request) -> Response:
        """Write the event log of every core.

        Every core stops scheduling while it writes, so this route needs --dump-dir.
        """
        if self._serving.config.frontend.dump_dir is None:
            raise APIError(
                403,
                "This server was started without --dump-dir DIR; restart it with that flag, "
                "or send SIGUSR1 to an engine core to dump its event log",
                type="permission_error",
            )
        self._serving.verify_serving()
        try:
            files = await self._serving.engine.calls.dump_event_logs()
        except EngineError as error:
            raise APIError(500, f"Cannot write the event log: {error}") from error
        return json_response({"files": files})
