"""Routes that drain, restart and undrain replicas one by one while the others serve."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.supervisor_messages import ReplicaAction, ReplicaInfo, ReplicaState
from ...client.engine_watch import EngineWatch
from ...http.errors import APIError, bad_request, echo, json_response, unavailable
from ..serving import Serving


class Replicas:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def list(self, request: Request) -> Response:
        """Every replica's state, lives and load."""
        return json_response({"replicas": msgspec.to_builtins(self._watch().status.replicas)})

    async def command(self, request: Request) -> Response:
        """Answers as soon as the supervisor says that the replica is to get no new requests, or gets them again."""
        index = parse_rank(request.path_params["index"], "replica", self._serving.num_replicas)
        wanted = request.path_params["action"]
        if wanted not in set(ReplicaAction):
            raise APIError(
                404,
                f"Unknown replica action {echo(wanted)}; use {', '.join(ReplicaAction)}",
            )
        action = ReplicaAction(wanted)
        watch = self._watch()
        replicas = watch.status.replicas
        if action is not ReplicaAction.UNDRAIN and not _others_serve(index, replicas):
            raise APIError(
                409,
                f"Replica {index} is the only serving replica; undrain another first, wait until one is up, "
                "or start the server with more (--data-parallel-size)",
                type="conflict_error",
            )
        try:
            info = await watch.send_command(index, action)
        except TimeoutError:
            raise unavailable(
                f"Replica {index} did not execute {action} in time; check GET /engine/status and retry",
                self._serving.retry_after_s,
            ) from None
        return json_response(msgspec.to_builtins(info))

    def _watch(self) -> EngineWatch:
        """Raises APIError 503 before the supervisor has said that the engine is ready."""
        watch = self._serving.engine.watch
        if watch is None or not watch.status.replicas:
            raise unavailable("The server is starting", self._serving.retry_after_s)
        return watch


def parse_rank(text: str, param: str, num_replicas: int) -> int:
    """Return the number of a replica. Raise APIError 400 if it is invalid."""
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) < num_replicas:
        return int(text)
    raise bad_request(
        param, f"{param} must be an integer from 0 to {num_replicas - 1}, got {echo(text)}"
    )


def _others_serve(index: int, replicas: list[ReplicaInfo]) -> bool:
    others = (info for info in replicas if info.replica != index)
    return any(info.is_up and info.state is ReplicaState.SERVING for info in others)
