"""Runs the sequences of one HTTP request: submits them, watches for a disconnect and collects the outputs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from starlette.types import Receive, Scope

from ...protocol.errors import POISON_REQUEST
from ...protocol.sampling_params import SamplingParams
from ..client.engine_client import (
    Delta,
    EngineDead,
    EngineDraining,
    Overloaded,
    ReplicaUnavailable,
    RequestGroup,
    SequenceRequest,
)
from ..client.request_group import STREAMED_AT_ONCE
from ..http.errors import (
    bad_request,
    deadline_exceeded,
    internal_error,
    redact,
    too_many_requests,
    unavailable,
)
from .bodies.body import ClientDisconnected
from .prompts import verify_num_sequences
from .routes.replicas import parse_rank
from .sampling import params_for_output
from .schema import GenerationRequest, StreamOptions
from .serving import Serving

MAX_USER_CHARACTERS: Final = 256
"""Maximum length of a request's `user`."""

MAX_STREAMED_LOGPROBS: Final = 1 << 13
"""Maximum log-probabilities that a stream writes at once, because it writes them on the event loop."""

SEQUENCES_AT_ONCE: Final = 512
"""Sequences of a request that are created before other tasks run; takes about 2 ms."""

RANK_HEADER: Final = "X-data-parallel-rank"
_RANK_HEADER = RANK_HEADER.lower().encode()


@dataclass(slots=True)
class PreparedPrompt:
    """A prompt with verified parameters; `text` is None if the request gave token ids.

    `predicted_token_ids` is the client's prediction of the output; None without one.
    """

    token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    text: str | None = None
    predicted_token_ids: npt.NDArray[np.int32] | None = None


def verify_streaming(request: GenerationRequest) -> None:
    """Verify the fields that depend on whether the response is streamed.

    Raises:
        APIError: `prompt_logprobs` with a stream, or `stream_options` without one (400).
    """
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs", "prompt_logprobs cannot be streamed")
    if request.stream_options not in (None, StreamOptions()) and not request.stream:
        raise bad_request("stream_options", "stream_options is only allowed with stream=true")


def verify_streamed_logprobs(
    request: GenerationRequest, prompts: list[PreparedPrompt], serving: Serving
) -> None:
    """Verify that a step of the stream has few enough log-probabilities to be written at once.

    Raises:
        APIError: A step may have more than `MAX_STREAMED_LOGPROBS` (400).
    """
    params = prompts[0].params
    if not request.stream or params.logprobs is None:
        return
    num_entries = 1 + (
        serving.config.model.vocab_size if params.logprobs == -1 else params.logprobs
    )
    num_running = min(
        len(prompts) * params.n, serving.config.scheduler.max_num_seqs, STREAMED_AT_ONCE
    )
    if num_entries * num_running > MAX_STREAMED_LOGPROBS:
        raise bad_request(
            "logprobs",
            f"{num_entries} log-probabilities for each of {num_running} sequences are too many for a stream; "
            f"at most {MAX_STREAMED_LOGPROBS} per step are allowed; use stream=false or request fewer",
        )


def find_tenant(request: GenerationRequest, key_tenant: str) -> str:
    """Return the tenant whose limits apply: the tenant of the API key, else the request's `user`.

    Raises:
        APIError: `user` is too long (400).
    """
    user = request.user or ""
    if len(user) > MAX_USER_CHARACTERS:
        raise bad_request(
            "user", f"user must have at most {MAX_USER_CHARACTERS} characters, got {len(user)}"
        )
    return key_tenant or user


def find_data_parallel_rank(scope: Scope, num_replicas: int) -> int | None:
    """Return the replica that the client selects in a header; None for any replica.

    Raises:
        APIError: The value is invalid (400).
    """
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
    cache_owner: bytes,
    deadline: float,
    data_parallel_rank: int | None,
    trace_headers: dict[str, str] | None,
) -> RequestGroup:
    """Start every output of every prompt; sequence `i * n + j` is output j of prompt i.

    `deadline` is in CLOCK_MONOTONIC seconds, 0.0 for none. `data_parallel_rank` is None for any replica.

    Raises:
        APIError: The request has too many sequences (400), or the engine cannot accept them now (503).
        ParameterError: A parameter is invalid.
    """
    n = prompts[0].params.n
    verify_num_sequences(len(prompts) * n)
    priority = request.priority or 0
    if not -(2**31) <= priority < 2**31:
        raise bad_request("priority", f"priority must fit in 32 bits, got {priority}")
    sequences: list[SequenceRequest] = []
    for prompt in prompts:
        num_before = len(sequences)
        sequences += (
            SequenceRequest(
                prompt_token_ids=prompt.token_ids,
                params=params_for_output(prompt.params, j),
                priority=priority,
                cache_salt=request.cache_salt,
                cache_owner=cache_owner,
                tenant=tenant,
                deadline=deadline,
                data_parallel_rank=data_parallel_rank,
                trace_headers=trace_headers,
                predicted_token_ids=prompt.predicted_token_ids,
            )
            for j in range(n)
        )
        if len(sequences) // SEQUENCES_AT_ONCE > num_before // SEQUENCES_AT_ONCE:
            await asyncio.sleep(0)
    try:
        return await serving.engine.submit(sequences, request_id=request_id)
    except Overloaded as error:
        raise unavailable(str(error), error.retry_after_s) from None
    except ReplicaUnavailable as error:
        raise unavailable(f"{error}; leave out {RANK_HEADER}", serving.retry_after_s) from None
    except EngineDraining as error:
        raise unavailable(str(error), serving.retry_after_s) from None
    except EngineDead as error:
        raise unavailable(redact(str(error)), serving.retry_after_s) from None


class ClientWatch:
    """A context that aborts `group` as soon as the client disconnects, and in any case on exit."""

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


async def wait_for_end(group: RequestGroup, receive: Receive) -> None:
    """Wait until every sequence has finished.

    Raises:
        ClientDisconnected: The client closed the connection first.
    """
    with ClientWatch(receive, group) as watch:
        await group.wait_for_end()
        if watch.disconnected:
            raise ClientDisconnected


def read_outputs(group: RequestGroup) -> list[Delta]:
    """Return the complete output of every sequence.

    Raises:
        APIError: A sequence failed.
    """
    outputs = group.read_all()
    for output in outputs:
        raise_if_failed(output)
    return outputs


def raise_if_failed(delta: Delta) -> None:
    """Raise APIError if the engine ended this sequence without finishing it."""
    reason = delta.finish_reason
    if reason in (None, "stop", "length"):
        return
    message = redact(delta.error or f"The request failed before it finished: {reason}")
    if reason == "ignored":
        raise bad_request(None, message)
    if reason == "rejected":
        raise unavailable(message, delta.retry_after_s)
    if reason == "throttled":
        raise too_many_requests(message, delta.retry_after_s)
    if reason == "expired":
        raise deadline_exceeded(message, delta.retry_after_s)
    raise internal_error(message, may_retry=delta.error != POISON_REQUEST)
