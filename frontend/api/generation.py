"""Runs one HTTP request's sequences: submits them, watches the client, collects what they generate."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from starlette.types import Receive, Scope

from ...protocol.errors import CONVICTION
from ...protocol.sampling_params import SamplingParams
from ..engine_client import (
    Delta,
    EngineDead,
    EngineDraining,
    Overloaded,
    ReplicaUnavailable,
    RequestGroup,
    SequenceRequest,
)
from .body import ClientDisconnected
from .errors import (
    bad_request,
    deadline_exceeded,
    internal_error,
    public,
    too_many_requests,
    unavailable,
)
from .prompts import verify_num_sequences
from .replicas import parse_rank
from .sampling import params_for_output
from .schema import GenerationRequest, StreamOptions
from .serving import Serving

MAX_USER_CHARACTERS: Final = 256

RANK_HEADER: Final = "X-data-parallel-rank"
_RANK_HEADER = RANK_HEADER.lower().encode()


@dataclass(slots=True)
class PreparedPrompt:
    """A prompt with verified parameters; `text` only where the request gave it as text."""

    token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    text: str | None = None


def verify_streaming(request: GenerationRequest) -> None:
    """Raises APIError 400 for what a stream cannot carry, and for what only a stream can."""
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs", "prompt_logprobs cannot be streamed")
    if request.stream_options not in (None, StreamOptions()) and not request.stream:
        raise bad_request("stream_options", "stream_options is only allowed with stream=true")


def find_tenant(request: GenerationRequest, of_key: str) -> str:
    """The tenant whose limits the request counts towards: `of_key`, or its `user`.

    Raises APIError 400 for a name that is too long.
    """
    user = request.user or ""
    if len(user) > MAX_USER_CHARACTERS:
        raise bad_request(
            "user", f"user must have at most {MAX_USER_CHARACTERS} characters, got {len(user)}"
        )
    return of_key or user


def find_data_parallel_rank(scope: Scope, num_replicas: int) -> int | None:
    """The replica that the client asks for in a header. Raises APIError 400 for a value that is none."""
    for name, value in scope["headers"]:
        if name == _RANK_HEADER:
            return parse_rank(value.decode("latin-1").strip(), RANK_HEADER, num_replicas)
    return None


async def submit(
    serving: Serving,
    request: GenerationRequest,
    prompts: list[PreparedPrompt],
    request_id: str,
    *,
    tenant: str,
    deadline: float,
    data_parallel_rank: int | None,
) -> RequestGroup:
    """Start every output of every prompt: sequence `i * n + j` is output j of prompt i.

    `deadline` is in CLOCK_MONOTONIC seconds, 0.0 for none. Raises APIError 400 or 503, ParameterError.
    """
    n = prompts[0].params.n
    verify_num_sequences(len(prompts) * n)
    priority = request.priority or 0
    if not -(2**31) <= priority < 2**31:
        raise bad_request("priority", f"priority must fit into 32 bits, got {priority}")
    sequences = [
        SequenceRequest(
            prompt_token_ids=prompt.token_ids,
            params=params_for_output(prompt.params, j),
            priority=priority,
            cache_salt=request.cache_salt,
            tenant=tenant,
            deadline=deadline,
            data_parallel_rank=data_parallel_rank,
        )
        for prompt in prompts
        for j in range(n)
    ]
    try:
        return await serving.engine.submit(sequences, request_id=request_id)
    except Overloaded as error:
        raise unavailable(str(error), error.retry_after_s) from None
    except ReplicaUnavailable as error:
        raise unavailable(f"{error}; leave out {RANK_HEADER}", serving.retry_after_s) from None
    except EngineDraining as error:
        raise unavailable(str(error), serving.retry_after_s) from None
    except EngineDead as error:
        raise unavailable(public(str(error)), serving.retry_after_s) from None


class ClientWatch:
    """While entered, aborts `group` as soon as the client is gone; on exit, whatever is unfinished."""

    def __init__(self, receive: Receive, group: RequestGroup) -> None:
        self._receive = receive
        self._group = group
        self.disconnected = False

    def __enter__(self) -> ClientWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    def __exit__(self, *exc: object) -> None:
        self._task.cancel()
        self._group.abort()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        self._group.abort()


async def collect(group: RequestGroup, receive: Receive) -> list[Delta]:
    """Wait for every sequence. Raises APIError for one that failed, ClientDisconnected."""
    with ClientWatch(receive, group) as watch:
        outputs = await group.result()
        if watch.disconnected:
            raise ClientDisconnected
    for output in outputs:
        raise_if_failed(output)
    return outputs


def raise_if_failed(delta: Delta) -> None:
    """Raises APIError if the engine ended this sequence other than by finishing it."""
    reason = delta.finish_reason
    if reason in (None, "stop", "length"):
        return
    message = public(delta.error or f"The request ended early: {reason}")
    if reason == "ignored":
        raise bad_request(None, message)
    if reason == "rejected":
        raise unavailable(message, delta.retry_after_s)
    if reason == "throttled":
        raise too_many_requests(message, delta.retry_after_s)
    if reason == "expired":
        raise deadline_exceeded(message, delta.retry_after_s)
    raise internal_error(message, may_retry=delta.error != CONVICTION)
