"""Routes that drain, restart and undrain replicas one at a time while the others serve, and change their roles."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....protocol.config import ReplicaRole
from ....protocol.errors import EngineError
from ....protocol.supervisor_messages import NEW_ROLES, ReplicaAction, ReplicaInfo, ReplicaState
from ...client.engine_watch import EngineWatch
from ...http.errors import APIError, echo, json_response, redact, unavailable, wrong
from ..numbers import parse_number
from ..serving import Serving

CALL_S: Final = 5.0
"""Seconds until a call to the cores is given up, because one of them may be busy or hang."""

_NEED_OTHERS: Final = (ReplicaAction.DRAIN, ReplicaAction.RESTART, ReplicaAction.SLEEP)
"""The actions that would leave no serving replica. `POST /sleep` lets all replicas sleep."""


class Replicas:
    """Routes that list and control replicas."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def list(self, request: Request) -> Response:
        """Return the state, restarts and load of every replica."""
        return json_response({"replicas": msgspec.to_builtins(self._watch().status.replicas)})

    async def kv_caches(self, request: Request) -> Response:
        """Return a letter of `BlockState` for each KV-cache block of each replica; of large caches, for every N-th."""
        try:
            async with asyncio.timeout(CALL_S):
                states = await self._serving.engine.calls.describe_blocks()
        except (EngineError, TimeoutError) as error:
            message = f"The KV caches were not described: {redact(str(error)) or 'a core is busy'}"
            raise unavailable(message, self._serving.retry_after_s) from error
        described = [{"replica": index, "states": each} for index, each in enumerate(states)]
        return json_response({"replicas": described})

    async def command(self, request: Request) -> Response:
        """Start an action on a replica. Answer once the supervisor reports that it has begun."""
        index = parse_rank(request.path_params["index"], "replica", self._serving.num_replicas)
        wanted = request.path_params["action"]
        if wanted not in set(ReplicaAction):
            raise APIError(
                404,
                f"Unknown replica action {echo(wanted)}; use {', '.join(ReplicaAction)}",
            )
        action = ReplicaAction(wanted)
        parallel = self._serving.config.parallel
        if (
            action in (ReplicaAction.RESTART, ReplicaAction.SLEEP)
            and parallel.divides_experts_among_replicas
        ):
            raise APIError(
                409,
                f"Replica {index} cannot {action} alone: it divides the experts with the other replicas "
                "(--enable-expert-parallel with --data-parallel-size); drain it, or restart the server",
                type="conflict_error",
            )
        watch = self._watch()
        replicas = watch.status.replicas
        if action in NEW_ROLES:
            _check_role(index, NEW_ROLES[action], replicas)
        elif action in _NEED_OTHERS and not _others_serve(index, replicas):
            raise APIError(
                409,
                f"Replica {index} is the only serving replica; undrain another first, wait until one is up, "
                "or start the server with more replicas (--data-parallel-size)",
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
        watch = self._serving.engine.watch
        if watch is None or not watch.status.replicas:
            raise unavailable("The server is starting; retry later", self._serving.retry_after_s)
        return watch


def parse_rank(text: str, param: str, num_replicas: int) -> int:
    """Return the number of a replica. Raise APIError 400 if the text is not the number of a replica."""
    if (rank := parse_number(text)) is not None and rank < num_replicas:
        return rank
    raise wrong(param, f"an integer from 0 to {num_replicas - 1}", text)


def _others_serve(index: int, replicas: list[ReplicaInfo]) -> bool:
    others = (info for info in replicas if info.replica != index)
    return any(info.is_up and info.state is ReplicaState.SERVING for info in others)


def _check_role(index: int, role: ReplicaRole, replicas: list[ReplicaInfo]) -> None:
    if replicas[index].role is None:
        raise APIError(
            409,
            f"Replica {index} has no role; start the server with --replica-roles to have replicas of each role",
            type="conflict_error",
        )
    others = [info for info in replicas if info.replica != index]
    if role is ReplicaRole.PREFILL and all(info.role is ReplicaRole.PREFILL for info in others):
        raise APIError(
            409,
            f"Replica {index} is the only one that generates tokens; make another one a decode replica first",
            type="conflict_error",
        )
